import pytest
import torch

from moira_kernels import Coverage, FixedCount, Oracle, ProfiledCount, Proportional, SinkWindow, attention, estimate
from moira_kernels.testing import Geometry, make_case

GEOMETRY = Geometry(6, 2, 32)
SELECTORS = {
    "coverage": (Coverage(gamma=0.8), None),
    "oracle": (Oracle(gamma=0.8), None),
    "fixed": (FixedCount(count=5), [5, 1, 0, 5]),
    "proportional": (Proportional(fraction=0.3), [5, 1, 0, 2]),
    "profiled": (ProfiledCount(counts=torch.tensor([4, 4])), [4, 1, 0, 4]),
    "window": (SinkWindow(sink_pages=2, window_pages=3), [5, 1, 0, 5]),
}


@pytest.fixture
def case():
    q, kv = make_case([1000, 50, 0, 350], GEOMETRY)
    return 3 * q, kv


@pytest.mark.parametrize("name", SELECTORS)
def test_lists_are_valid_and_as_long_as_the_rule_says(case, name):
    q, kv = case
    selector, lengths = SELECTORS[name]
    selector.allocate(kv)
    selector.update(kv, torch.arange(1, kv.k.shape[0]))
    pages = selector.select(q, kv)
    if lengths is not None:
        assert pages.lengths.tolist() == [[n, n] for n in lengths]
    for b in range(kv.batch):
        own = kv.block_table[b, : kv.num_pages()[b]].tolist()
        for h in range(2):
            ids = pages.page_ids[b, h, : pages.lengths[b, h]].tolist()
            assert [page for page in own if page in ids] == ids
            if own:
                assert (ids[0], ids[-1]) == (own[0], own[-1])


def test_oracle_reaches_gamma_with_the_fewest_pages(case):
    q, kv = case
    pages = Oracle(gamma=0.8).select(q, kv)
    shares = torch.softmax(estimate.exact_reference(q, kv), -1).nan_to_num().unflatten(1, (2, 3)).mean(2)
    for h in range(2):
        n = int(pages.lengths[0, h])
        forced = shares[0, h, 0] + shares[0, h, 15]
        rest = shares[0, h, 1:15].sort(descending=True).values
        assert forced + rest[: n - 2].sum() >= 0.8 - 1e-5
        assert forced + rest[: n - 3].sum() < 0.8


def test_gamma_one_is_dense_attention(case):
    q, kv = case
    selector = Coverage(gamma=1.0)
    selector.allocate(kv)
    selector.update(kv, torch.arange(1, kv.k.shape[0]))
    pages = selector.select(q, kv)
    assert pages.lengths.tolist() == [[n, n] for n in kv.num_pages().tolist()]
    out, _ = attention.reference(q, kv, pages)
    keys = kv.k[kv.block_table[0].long(), 1].flatten(0, 1)[:1000].float()
    values = kv.v[kv.block_table[0].long(), 1].flatten(0, 1)[:1000].float()
    want = torch.softmax(q[0, 3:].float() @ keys.T * 32**-0.5, -1) @ values
    torch.testing.assert_close(out[0, 3:], want)


def test_lists_follow_the_current_query(case):
    q, kv = case
    selector = Coverage(gamma=0.5)
    selector.allocate(kv)
    selector.update(kv, torch.arange(1, kv.k.shape[0]))
    page = kv.block_table[0, 7]
    kv.k[page, 0, 10] = 40 * torch.nn.functional.normalize(q[0, 0].float(), dim=0).to(q.dtype)
    selector.update(kv, page[None])
    assert page in selector.select(q, kv).page_ids[0, 0, : selector.select(q, kv).lengths[0, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Coverage(gamma=0.0), r"gamma: expected a number in \(0, 1\], got 0.0"),
        (lambda: Proportional(fraction=1.5), "fraction"),
        (lambda: FixedCount(count=0), "count: expected at least 1"),
        (lambda: SinkWindow(sink_pages=0), "sink_pages"),
        (lambda: ProfiledCount(counts=torch.tensor([[1.0]])), "counts: expected int32 or int64"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()
