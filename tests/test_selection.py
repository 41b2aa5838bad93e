import itertools
import math

import pytest
import torch

from moira_kernels import PagedKV, RaggedPages, selection
from moira_kernels.testing import Geometry, make_case

RULES = {"sorted": selection.coverage_sorted, "bisection": selection.coverage_bisection}


def pages(n):
    return torch.tensor([n], dtype=torch.int32)


def kept(mask):
    return mask[0, 0].nonzero().flatten().tolist()


def row(*shares):
    return torch.tensor(shares, dtype=torch.float32)[None, None]


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


def test_example_of_the_paper(rule):
    """Shares .70 .20 .08 .02: gamma .9 keeps two pages and .98 three, here between a sink and a current page of 0."""
    shares = row(0, 0.02, 0.70, 0.08, 0.20, 0)
    assert kept(rule(shares, pages(6), 0.9)) == [0, 2, 4, 5]
    assert kept(rule(shares, pages(6), 0.97)) == [0, 2, 3, 4, 5]


def test_group_mean_divides_by_the_group_d1():
    """.7 .2 .08 .02 in every head of a group of 3, 5, 7: keep {0, 1, current} at gamma .9."""
    for group in (3, 5, 7):
        log_mass = torch.tensor([0.7, 0.2, 0.08, 0.02]).log().expand(1, 2 * group, 4)
        shares = selection.group_shares(log_mass.contiguous(), 2)
        torch.testing.assert_close(shares[0, 1], torch.tensor([0.7, 0.2, 0.08, 0.02]))
        assert kept(selection.coverage_bisection(shares, pages(4), 0.9)) == [0, 1, 3]


@pytest.mark.parametrize(("length", "want"), [(0, []), (1, [0]), (2, [0, 1])])
def test_rows_of_forced_pages_only_k6(rule, length, want):
    shares = torch.full((1, 1, 5), 0.2)
    assert kept(rule(shares, pages(length), 0.98)) == want


def test_forced_pages_that_reach_gamma_alone_keep_nothing_else(rule):
    assert kept(rule(row(0.7, 0.05, 0.02, 0.23), pages(4), 0.9)) == [0, 3]


def test_zero_shares_are_not_listed_k2(rule):
    shares = torch.zeros(1, 1, 256)
    shares[0, 0, 0] = 1.0
    assert kept(rule(shares, pages(5), 0.98)) == [0, 4]


def test_gamma_one_keeps_every_page(rule):
    shares = torch.zeros(1, 1, 9)
    shares[0, 0, 0] = 1.0
    assert kept(rule(shares, pages(7), 1.0)) == list(range(7))


def test_ties_are_all_kept_k1(rule):
    shares = torch.cat([row(0.3), torch.full((1, 1, 1000), 0.0005), row(0.2)], -1)
    assert int(rule(shares, pages(1002), 0.9).sum()) == 1002


def test_fixed_count_is_exact_and_takes_the_lowest_index_of_equals_k1():
    shares = torch.cat([row(0.3), torch.full((1, 1, 1000), 0.0005), row(0.2)], -1)
    assert kept(selection.largest(shares, pages(1002), 100)) == [*range(99), 1001]


@pytest.mark.parametrize(("count", "want"), [(1, 2), (2, 2), (3, 3), (10, 4)])
def test_fixed_count_edges_k4(count, want):
    assert int(selection.largest(row(0.1, 0.5, 0.3, 0.1), pages(4), count).sum()) == want


def test_counts_per_head():
    shares = torch.rand(2, 3, 20)
    counts = torch.tensor([[3, 5, 40], [2, 20, 7]])
    mask = selection.largest(shares, torch.tensor([20, 6], dtype=torch.int32), counts)
    assert mask.sum(-1).tolist() == [[3, 5, 20], [2, 6, 6]]


@pytest.mark.parametrize("length", [3, 64, 255, 256, 1023, 1024, 4095, 4096, 4097, 16384])
@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.98, 0.999])
def test_bisection_finds_the_sorted_set_a5(length, gamma):
    """Masses 1/i and random ones; what bisection keeps beyond the definition lies within 2^-24 of the largest share."""
    generator = torch.Generator().manual_seed(length)
    harmonic = (1 / torch.arange(1, length + 1)).log()
    random = 3 * torch.randn(length, generator=generator)
    shares = selection.group_shares(torch.stack([harmonic, random])[None], 2)
    exact = selection.coverage_sorted(shares, pages(length), gamma)
    found = selection.coverage_bisection(shares, pages(length), gamma)
    assert (found | ~exact).all()
    middle = shares[..., 1:-1]
    for h in range(2):
        tau = shares[0, h][exact[0, h]][1:-1].min() if exact[0, h].sum() > 2 else math.inf
        extra = (found & ~exact)[0, h]
        assert (shares[0, h][extra] >= tau - middle[0, h].max() * 2.0**-23).all()
        assert shares[0, h][found[0, h]].double().sum() >= gamma - 1e-6


def test_smallest_set_that_reaches_gamma():
    shares = selection.group_shares(2 * torch.randn(1, 8, 200, generator=torch.Generator().manual_seed(1)), 8)
    mask = selection.coverage_sorted(shares, pages(200), 0.9)
    for h in range(8):
        inside = shares[0, h][mask[0, h]]
        assert inside.double().sum() >= 0.9 - 1e-6
        middle = inside[1:-1]
        assert inside.double().sum() - middle.min() < 0.9


def test_rows_do_not_depend_on_their_batch_n1():
    shares = selection.group_shares(torch.randn(16, 4, 300, generator=torch.Generator().manual_seed(2)), 4)
    lengths = torch.randint(1, 301, (16,), dtype=torch.int32)
    shares = torch.where(torch.arange(300) < lengths[:, None, None], shares, 0)
    together = selection.coverage_bisection(shares, lengths, 0.9)
    for b in range(16):
        assert torch.equal(
            selection.coverage_bisection(shares[b : b + 1], lengths[b : b + 1], 0.9), together[b : b + 1]
        )


def test_thresholds_per_pass():
    assert [selection.thresholds_per_pass(n) for n in (1, 255, 256, 1023, 1024, 4095, 4096, 65537)] == [
        8,
        8,
        4,
        4,
        2,
        2,
        2,
        2,
    ]


def test_compaction_lists_physical_pages_in_order_j1():
    _, kv = make_case([6 * 64, 130, 0], Geometry(2, 1, 8))
    keep = torch.tensor([[1, 0, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1], [1] * 6], dtype=torch.bool)[:, None]
    lists = selection.compact(keep, kv)
    assert lists.lengths.flatten().tolist() == [4, 2, 0]
    assert lists.last_page_len.flatten().tolist() == [64, 2, 0]
    assert lists.page_ids[0, 0, :4].tolist() == kv.block_table[0, [0, 2, 3, 4]].tolist()
    assert lists.page_ids[1, 0, :2].tolist() == kv.block_table[1, [0, 2]].tolist()


def test_empty_rows_have_no_share():
    shares = selection.group_shares(torch.full((1, 4, 3), -math.inf), 2)
    assert (shares == 0).all()


def rows_case(lengths, num_lists, device):
    """A cache of ``lengths`` pages of one token a row, only for its block table and lengths."""
    _, kv = make_case(lengths, Geometry(num_lists, num_lists, 1), page_size=1, device=device)
    return kv


def empty_lists(kv, num_lists):
    shape = (kv.batch, num_lists)
    return RaggedPages(
        torch.full((*shape, kv.max_pages), -7, dtype=torch.int32, device=kv.k.device),
        torch.full(shape, -7, dtype=torch.int32, device=kv.k.device),
        torch.full(shape, -7, dtype=torch.int32, device=kv.k.device),
    )


def assert_same_lists(got, want):
    assert torch.equal(got.lengths, want.lengths)
    assert torch.equal(got.last_page_len, want.last_page_len)
    for b, h in itertools.product(range(want.batch), range(want.num_lists)):
        n = int(want.lengths[b, h])
        assert torch.equal(got.page_ids[b, h, :n], want.page_ids[b, h, :n])
        assert (got.page_ids[b, h, n:] == -7).all()


def select_both(log_mass, kv, num_lists, gamma=None, counts=None):
    """(kernel's lists, reference's lists)."""
    got = empty_lists(kv, num_lists)
    selection.launch(log_mass, kv, got, gamma=gamma, counts=counts)
    column = torch.arange(kv.max_pages, device=log_mass.device)
    masked = torch.where(column < kv.num_pages()[:, None, None], log_mass, -math.inf)
    shares = selection.group_shares(masked, num_lists)
    if gamma is not None:
        keep = selection.coverage_bisection(shares, kv.num_pages(), gamma)
    else:
        keep = selection.largest(shares, kv.num_pages(), counts.expand(shares.shape[:2]))
    return got, selection.compact(keep, kv)


@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.98, 0.99, 1.0])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_kernel_lists_equal_the_reference_on_64_rows(device, gamma, spread):
    """Garbage stands where no page is, as Estimate leaves it."""
    lengths = [0, 1, 2, 3, 17, 100, 255, 256] * 2
    kv = rows_case(lengths, 4, device)
    generator = torch.Generator().manual_seed(7)
    log_mass = spread * torch.randn(len(lengths), 12, 256, generator=generator).to(device)
    beyond = torch.arange(256, device=device) >= kv.num_pages()[:, None, None]
    log_mass.masked_fill_(beyond, float("nan"))
    assert_same_lists(*select_both(log_mass, kv, 4, gamma=gamma))


def test_kernel_lists_equal_the_reference_on_real_masses(device):
    """64 rows of a real model's estimated masses, from the shipped recording."""
    from moira_cli.lists import SHIPPED, load_recorded

    recorded = load_recorded(SHIPPED)
    kv = rows_case(recorded.num_pages[recorded.sample[:, 0]].tolist(), 1, device)
    log_mass = torch.from_numpy(recorded.log_mass).float().to(device)
    for gamma in (0.9, 0.95, 0.98, 0.99):
        got, want = select_both(log_mass, kv, 1, gamma=gamma)
        assert_same_lists(got, want)
    fractions = want.lengths.float() / kv.num_pages()[:, None]
    assert fractions.std() > 0.1


@pytest.mark.parametrize("length", [4095, 4096, 4097, 8193, 16384])
def test_kernel_on_long_rows_a5(device, length):
    kv = rows_case([length, 5], 1, device)
    log_mass = (1 / torch.arange(1, length + 1)).log().expand(2, 8, length).contiguous().to(device)
    got, want = select_both(log_mass, kv, 1, gamma=0.9)
    # Sums over thousands of float32 shares may move the border by a page of nearly equal share.
    assert (got.lengths - want.lengths).abs().max() <= 1 + length // 4096
    assert got.page_ids[0, 0, 0] == kv.block_table[0, 0]
    assert got.page_ids[0, 0, got.lengths[0, 0] - 1] == kv.block_table[0, -1]
    assert_same_lists(*select_both(log_mass, kv, 1, counts=torch.tensor([37], dtype=torch.int32, device=device)))


def test_kernel_keeps_ties_and_counts_exactly_k1(device):
    kv = rows_case([1002], 1, device)
    shares = torch.full((1, 1, 1002), 0.0005)
    shares[0, 0, 0], shares[0, 0, -1] = 0.3, 0.2
    log_mass = shares.log().to(device)
    got, _ = select_both(log_mass, kv, 1, gamma=0.9)
    assert got.lengths.item() == 1002
    for count in (0, 1, 2, 3, 100, 1002, 5000):
        counts = torch.tensor([count], dtype=torch.int32, device=device)
        assert_same_lists(*select_both(log_mass, kv, 1, counts=counts))


def test_kernel_lists_no_page_past_the_row_k2(device):
    kv = rows_case([5, 256], 1, device)
    log_mass = torch.full((2, 1, 256), -200.0, device=device)
    log_mass[:, :, 0] = 0
    got, _ = select_both(log_mass, kv, 1, gamma=0.98)
    assert got.lengths.flatten().tolist() == [2, 2]


def test_kernel_lists_do_not_depend_on_the_batch_n1(device):
    lengths = [300, 7, 120, 299, 64, 2, 250, 300]
    kv = rows_case(lengths, 2, device)
    log_mass = 2 * torch.randn(8, 4, 300, generator=torch.Generator().manual_seed(3)).to(device)
    together, _ = select_both(log_mass, kv, 2, gamma=0.95)
    for b in range(8):
        one = PagedKV(kv.k, kv.v, kv.block_table[b : b + 1], kv.seq_lens[b : b + 1])
        alone, _ = select_both(log_mass[b : b + 1].contiguous(), one, 2, gamma=0.95)
        for name in ("page_ids", "lengths", "last_page_len"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[b : b + 1])


def test_kernel_needs_one_rule(device):
    kv = rows_case([5], 1, device)
    log_mass = torch.zeros(1, 1, 5, device=device)
    with pytest.raises(ValueError, match="expected exactly one"):
        selection.launch(log_mass, kv, empty_lists(kv, 1))
