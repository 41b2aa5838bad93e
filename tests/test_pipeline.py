"""A whole decode layer against the selectors' references: in the interpreter on a CPU, compiled on a GPU."""

import pytest
import torch

from moira_kernels import Coverage, PagedKV, attention, selection
from moira_kernels.pipeline import DecodeLayer
from moira_kernels.testing import Geometry, assert_close, bf16_ulp, make_case, max_abs_error

GEOMETRY = Geometry(6, 2, 32)


def full_pages(kv):
    """Physical ids [n] int32 of every full page."""
    rows = zip(kv.block_table, kv.seq_lens.tolist(), strict=True)
    return torch.cat([table[: n // kv.page_size] for table, n in rows])


def step_with_reference(layer, q, kv, gamma):
    """Run a step; compare its lists with the selector's and its output with attention over them."""
    selector = Coverage(gamma=gamma)
    selector.allocate(kv)
    selector.update(kv, full_pages(kv).long())
    selector.summaries.mean.copy_(layer.summaries.mean)
    selector.summaries.variance.copy_(layer.summaries.variance)
    out = layer.run(q, kv, gamma=gamma)
    want = selector.select(q, kv)
    assert torch.equal(layer.pages.lengths, want.lengths)
    truth, _ = attention.reference(q, kv, want)
    assert_close(out, truth, attention.reference(q, kv, want, dtype=q.dtype)[0])
    return out


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("gamma", [0.7, 0.95])
def test_layer_against_reference(device, layout, gamma):
    q, kv = make_case([900, 64, 0, 1, 130, 65], GEOMETRY, layout=layout, device=device)
    layer = DecodeLayer.allocate(kv, 6)
    layer.prefill(kv, full_pages(kv))
    out = step_with_reference(layer, 3 * q, kv, gamma)
    assert (out[2] == 0).all()
    assert int(layer.pages.lengths[0].min()) < 15


def test_gamma_one_is_dense_within_an_ulp(device):
    q, kv = make_case([500, 70], GEOMETRY, device=device)
    layer = DecodeLayer.allocate(kv, 6)
    layer.prefill(kv, full_pages(kv))
    out = layer.run(q, kv, gamma=1.0)
    everything = selection.compact(torch.ones(2, 2, kv.max_pages, dtype=torch.bool, device=device), kv)
    truth, _ = attention.reference(q, kv, everything)
    assert max_abs_error(out, truth) <= bf16_ulp(truth.abs().max()).item()


def test_decode_over_a_page_border(device):
    """Token by token from 60 to 68: the page's summary is there when the page becomes an inner one."""
    q, kv = make_case([200, 68], GEOMETRY, device=device)
    layer = DecodeLayer.allocate(kv, 6)
    layer.summaries.mean.fill_(float("nan"))
    layer.summaries.variance.fill_(float("nan"))
    layer.prefill(kv, kv.block_table[0, :3].contiguous())
    for seq_len in range(124, 132):
        kv.seq_lens.copy_(torch.tensor([seq_len, seq_len - 64], dtype=torch.int32))
        out = layer.run(q, kv, gamma=0.9)
        assert out.isfinite().all()


@pytest.mark.parametrize("chunks", [(100, 100), (40,) * 5, (63, 1, 136), (64, 64, 72), (200,)])
def test_chunked_prefill_gives_the_same_summaries_g5(device, chunks):
    _, kv = make_case([200], GEOMETRY, device=device)
    layer = DecodeLayer.allocate(kv, 6)
    layer.summaries.mean.fill_(float("nan"))
    done = 0
    for chunk in chunks:
        filled = kv.block_table[0, done // 64 : (done + chunk) // 64].contiguous()
        layer.prefill(kv, filled)
        done += chunk
    whole = DecodeLayer.allocate(kv, 6)
    whole.prefill(kv, kv.block_table[0, :3].contiguous())
    pages = kv.block_table[0, :3].long()
    assert torch.equal(layer.summaries.mean[pages], whole.summaries.mean[pages])
    assert layer.summaries.mean[kv.block_table[0, 3].long()].isnan().all()


def test_buffers_are_counted():
    _, kv = make_case([200], GEOMETRY)
    layer = DecodeLayer.allocate(kv, 6)
    assert layer.nbytes >= 2 * kv.k.shape[0] * 2 * 32 * 2 + 6 * 4 * 4


@pytest.mark.gpu
def test_graph_replay_is_bit_identical_with_other_lengths():
    q, kv = make_case([40_000, 300, 64, 5000], Geometry(32, 8, 128), device="cuda")
    layer, eager = (DecodeLayer.allocate(kv, 32) for _ in range(2))
    for each in (layer, eager):
        each.prefill(kv, full_pages(kv))
        each.run(q, kv, gamma=0.95)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run(q, kv, gamma=0.95)
    for lens in ([40_000, 300, 64, 5000], [100, 1, 0, 64], [33_000, 0, 0, 0], [65, 129, 64, 4097], [0, 0, 0, 0]):
        kv.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        layer.out.fill_(float("nan"))
        graph.replay()
        want = eager.run(q, kv, gamma=0.95)
        assert torch.equal(layer.out, want), lens
        assert torch.equal(layer.pages.lengths, eager.pages.lengths)


@pytest.mark.gpu
def test_physical_pages_beyond_int32_a1():
    """Summaries and keys of page 16,385 in every stage."""
    geometry = Geometry(32, 8, 128)
    cache = torch.zeros(16_386, 8, 64, 256, dtype=torch.bfloat16, device="cuda")
    q, small = make_case([200], geometry, device="cuda")
    table = torch.tensor([[16_385, 0, 16_384, 7]], dtype=torch.int32, device="cuda")
    for column, source in enumerate(small.block_table[0].tolist()):
        cache[table[0, column], :, :, :128] = small.k[source]
        cache[table[0, column], :, :, 128:] = small.v[source]
    outs = []
    for kv in (small, PagedKV.from_fused(cache, table, small.seq_lens)):
        layer = DecodeLayer.allocate(kv, 32)
        layer.prefill(kv, full_pages(kv))
        outs.append(layer.run(q, kv, gamma=0.9).clone())
    assert torch.equal(*outs)
