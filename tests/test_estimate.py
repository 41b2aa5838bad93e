import math

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
