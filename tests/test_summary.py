import pytest
import torch

from moira_kernels.layout import PagedKV
from moira_kernels.summary import PageSummaries, update, update_reference
from moira_kernels.testing import Geometry, make_case


def one_page(channel):
    """A cache of one 64-token page whose single channel holds these keys."""
    k = torch.tensor(channel, dtype=torch.bfloat16).view(1, 1, 64, 1).expand(1, 1, 64, 2).contiguous()
    return PagedKV(k, k, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([64], dtype=torch.int32))


def summary_of(channel):
    kv = one_page(channel)
    summaries = PageSummaries.allocate(kv, torch.float32)
    update_reference(summaries, kv, torch.tensor([0]))
    return summaries.mean[0, 0, 0].item(), summaries.variance[0, 0, 0].item()


def test_variance_neither_cancels_nor_turns_negative_g8():
    assert summary_of([256.0, 258.0] * 32) == (257.0, 1.0)
    assert summary_of([334.0] * 64) == (334.0, 0.0)
    assert summary_of([0.0] * 63 + [80.0]) == (1.25, 98.4375)


def test_only_the_named_pages_are_written():
    _, kv = make_case([256, 192], Geometry(2, 2, 8))
    summaries = PageSummaries.allocate(kv)
    for tensor in (summaries.mean, summaries.variance):
        tensor.fill_(float("nan"))
    update_reference(summaries, kv, torch.tensor([3, 5]))
    written = summaries.mean.isfinite().all(-1).all(-1)
    assert written.nonzero().flatten().tolist() == [3, 5]
    expected = kv.k[5].float().var(dim=1, unbiased=False)
    torch.testing.assert_close(summaries.variance[5].float(), expected, rtol=2**-8, atol=0)


def test_recycled_page_holds_its_new_owner_g3():
    _, kv = make_case([64], Geometry(1, 1, 4))
    summaries = PageSummaries.allocate(kv)
    for value in (5.0, -5.0):
        kv.k[1] = value
        update_reference(summaries, kv, torch.tensor([1]))
        assert (summaries.mean[1] == value).all()


@pytest.mark.parametrize(("page_size", "head_dim"), [(64, 64), (16, 80), (48, 128), (128, 32)])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_kernel_against_reference(device, page_size, head_dim, layout):
    """Within one bf16 rounding, in the named pages only."""
    geometry = Geometry(2, 2, head_dim)
    _, kv = make_case([3 * page_size, 2 * page_size], geometry, page_size=page_size, layout=layout, device=device)
    kv.k[1:3] += 300.0
    got, want = PageSummaries.allocate(kv), PageSummaries.allocate(kv)
    ids = torch.tensor([2, 4, 5], dtype=torch.int32, device=device)
    for tensor in (got.mean, got.variance):
        tensor.fill_(float("nan"))
    update(got, kv, ids)
    update_reference(want, kv, ids.long())
    written = got.mean.isfinite().all(-1).all(-1)
    assert written.nonzero().flatten().tolist() == [2, 4, 5]
    for name in ("mean", "variance"):
        a, b = (getattr(x, name)[ids.long()].float() for x in (got, want))
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)
    update(got, kv, ids[:0])
