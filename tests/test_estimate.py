import math

import pytest
import torch

from moira_kernels import estimate
from moira_kernels.layout import PagedKV
from moira_kernels.summary import PageSummaries, update_reference
from moira_kernels.testing import Geometry, make_case


def summarized(kv):
    summaries = PageSummaries.allocate(kv, torch.float32)
    update_reference(summaries, kv, torch.arange(kv.k.shape[0]))
    return summaries


def test_equation_2_with_any_scale_f5():
    q = torch.zeros(1, 128)
    q[0, 3] = 1.0
    mean, variance = torch.zeros(2, 128), torch.zeros(2, 128)
    mean[1, 3], variance[1, 3] = 3.0, 8.0
    for scale in (1 / 12, 1 / 128):
        got = estimate.mvar_log_mass(q, mean, variance, scale, 64)
        want = [math.log(64), scale * 3 + 0.5 * scale**2 * 8 + math.log(64)]
        torch.testing.assert_close(got, torch.tensor([want]), rtol=0, atol=1e-5)


def test_forced_pages_are_exact_and_inner_pages_follow_equation_2():
    q, kv = make_case([300, 64, 1, 0], Geometry(6, 2, 16), dtype=torch.float32)
    got = estimate.reference(q, kv, summarized(kv))
    exact = estimate.exact_reference(q, kv)
    assert got.shape == (4, 6, 5)
    for page in (0, 4):
        torch.testing.assert_close(got[0, :, page], exact[0, :, page])
    keys = kv.k[kv.block_table[0, 2].long(), 1].float()
    s = 16**-0.5
    want = s * q[0, 5] @ keys.mean(0) + 0.5 * (s * q[0, 5]) ** 2 @ keys.var(0, unbiased=False) + math.log(64)
    torch.testing.assert_close(got[0, 5, 2], want)
    assert (got[1:, :, 1:] == -math.inf).all()
    assert (got[3] == -math.inf).all()
    torch.testing.assert_close(got[2, :, 0], exact[2, :, 0])


def test_exact_mass_sums_to_the_softmax_denominator():
    q, kv = make_case([200], Geometry(2, 1, 8), dtype=torch.float32)
    keys = kv.k[kv.block_table[0].long(), 0].flatten(0, 1)[:200]
    want = (8**-0.5 * q[0] @ keys.T).logsumexp(-1)
    torch.testing.assert_close(estimate.exact_reference(q, kv)[0].logsumexp(-1), want)


def test_poison_outside_the_request_is_never_read_a7_b4_b6():
    q, kv = make_case([257, 65], Geometry(4, 2, 16), dtype=torch.float32)
    summaries = summarized(kv)
    clean = estimate.reference(q, kv, summaries), estimate.exact_reference(q, kv)
    table = kv.block_table.clone()
    table[1, 2:] = 2**30  # entries past the request
    kv = PagedKV(kv.k, kv.v, table, kv.seq_lens)
    kv.k[table[0, 4].long(), :, 1:] = float("nan")  # tail of the current page
    kv.k[0] = float("nan")  # page of nobody
    summaries.mean[0] = summaries.variance[0] = float("nan")
    for page in (table[0, 4], table[0, 0], table[1, 1]):  # no summary is read for the forced pages
        summaries.mean[page.long()] = float("nan")
    assert torch.equal(estimate.reference(q, kv, summaries), clean[0])
    assert torch.equal(estimate.exact_reference(q, kv), clean[1])


def estimate_on(q, kv, scale=None):
    """(kernel, reference) log masses on the same bf16 summaries; what is not to be written is NaN and -inf."""
    summaries = PageSummaries.allocate(kv)
    update_reference(summaries, kv, torch.arange(kv.k.shape[0], device=q.device))
    got = torch.full((kv.batch, q.shape[1], kv.max_pages), math.nan, device=q.device)
    estimate.launch(q, kv, summaries, got, scale)
    return got, estimate.reference(q, kv, summaries, scale)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("group", [1, 3, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_kernel_against_reference(device, layout, group, head_dim):
    """Rows of none, one, two and more pages than a tile; every valid page written, nothing else."""
    q, kv = make_case([4500, 0, 1, 64, 65, 128, 700], Geometry(2 * group, 2, head_dim), layout=layout, device=device)
    got, want = estimate_on(4 * q, kv)
    valid = want > -math.inf
    torch.testing.assert_close(got[valid], want[valid], rtol=1e-5, atol=1e-4)
    assert got[~valid].isnan().all()


@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
def test_kernel_at_other_page_sizes_and_scales_f5(device, page_size):
    q, kv = make_case([5 * page_size - 1 or 1, 2 * page_size], Geometry(4, 2, 32), page_size=page_size, device=device)
    for scale in (1 / 12, 1 / 128):
        got, want = estimate_on(q, kv, scale)
        valid = want > -math.inf
        torch.testing.assert_close(got[valid], want[valid], rtol=1e-5, atol=1e-4)


def test_kernel_with_fp16_queries_and_keys(device):
    """The square of an fp16 has 22 bits, of which the kernel takes 16."""
    q, kv = make_case([4500, 65], Geometry(8, 2, 64), dtype=torch.float16, device=device)
    got, want = estimate_on(q, kv)
    valid = want > -math.inf
    torch.testing.assert_close(got[valid], want[valid], rtol=2e-5, atol=1e-4)


def test_large_logits_keep_float32_precision_j3(device):
    """q and keys of about 30: logits in the hundreds, where TF32 would be off by tenths."""
    q, kv = make_case([640], Geometry(2, 1, 128), dtype=torch.bfloat16, device=device)
    kv.k.mul_(4).add_(30)
    got, want = estimate_on(30 + q, kv)
    assert want.max() > 1000
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-3)


def test_kernel_reads_nothing_outside_the_request_a7_b4_b6(device):
    q, kv = make_case([257, 65], Geometry(4, 2, 16), device=device)
    summaries = PageSummaries.allocate(kv)
    update_reference(summaries, kv, torch.arange(kv.k.shape[0], device=device))
    clean, dirty = (torch.zeros(2, 4, 5, device=device) for _ in range(2))
    estimate.launch(q, kv, summaries, clean)
    table = kv.block_table.clone()
    table[1, 2:] = 2**30
    kv = PagedKV(kv.k, kv.v, table, kv.seq_lens)
    kv.k[table[0, 4].long(), :, 1:] = float("nan")
    kv.k[0] = float("nan")
    for page in (0, table[0, 4], table[0, 0], table[1, 1]):
        summaries.mean[page] = float("nan")
    estimate.launch(q, kv, summaries, dirty)
    assert torch.equal(clean, dirty)


def test_summary_is_written_when_the_page_fills(device):
    """Decode token by token over a page border: the summary appears with the page's last slot and not before."""
    q, kv = make_case([200], Geometry(2, 1, 16), device=device)
    summaries = PageSummaries.allocate(kv)
    want = PageSummaries.allocate(kv)
    update_reference(want, kv, torch.arange(kv.k.shape[0], device=device))
    log_mass = torch.empty(1, 2, kv.max_pages, device=device)
    for seq_len in (63, 64, 65, 127, 128, 129):
        summaries.mean.fill_(float("nan"))
        kv.seq_lens.fill_(seq_len)
        estimate.launch(q, kv, summaries, log_mass)
        written = summaries.mean.isfinite().all(-1).all(-1).nonzero().flatten().tolist()
        assert written == ([int(kv.block_table[0, seq_len // 64 - 1])] if seq_len % 64 == 0 else [])
        for page in written:
            torch.testing.assert_close(summaries.mean[page].float(), want.mean[page].float(), rtol=2**-7, atol=1e-6)


def test_parts_fill_the_device_whatever_the_batch():
    """Thread blocks of a row's inner pages: never none, never more than tiles, together about one residency."""
    assert [estimate.parts_per_row(rows, 2032, 132) for rows in (8, 32, 256, 4096)] == [64, 33, 4, 1]
    assert estimate.parts_per_row(8, 1, 132) == 1
    assert estimate.parts_per_row(8, 33, 132) == 2
