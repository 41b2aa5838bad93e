"""A whole decode layer against the selectors' references: in the interpreter on a CPU, compiled on a GPU."""

import pytest
import torch

from moira_kernels import Coverage, PagedKV, RaggedPages, attention, selection
from moira_kernels.pipeline import DecodeLayer, ReferenceLayer
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


@pytest.mark.parametrize("layer_class", [DecodeLayer, ReferenceLayer])
def test_smaller_batches_use_the_first_rows(layer_class):
    q, kv = make_case([300, 70, 1], GEOMETRY)
    whole, part = layer_class.allocate(kv, 6, batch=7), PagedKV(kv.k, kv.v, kv.block_table[:2], kv.seq_lens[:2])
    whole.prefill(kv, full_pages(kv))
    lengths = torch.full((7, 2), -1, dtype=torch.int32)
    other = whole.sibling(kv, lengths)
    other.prefill(kv, full_pages(kv))
    together = whole.run(q, kv, gamma=0.9)
    assert together.shape == (3, 6, 32)
    out = torch.empty_like(q[:2])
    assert other.run(q[:2], part, gamma=0.9, out=out) is out
    # Slices are cut elsewhere in another batch, so an output may differ in rounding.
    assert (out - together[:2]).abs().max() <= bf16_ulp(together.abs().max())
    assert torch.equal(lengths[:2], whole.pages.lengths[:2])
    assert (lengths[2:] == -1).all()


@pytest.mark.parametrize("batch", [1, 3, 40, 64, 65, 200])
def test_eq4_scratch_covers_every_smaller_batch(batch):
    """Equation (4) cuts a smaller batch into more blocks per row; views have the shapes of a workspace of its own."""
    _, kv = make_case([1], GEOMETRY)
    layer = DecodeLayer.allocate(kv, 6, batch=batch, partition="eq4")
    for rows in range(1, batch + 1):
        want = attention.Workspace.allocate(rows, 6, 2, 32, torch.device("meta"), "eq4")
        work = layer._first_rows(rows)[2]
        assert (work.blocks, work.num_rows, work.partials.shape) == (want.blocks, want.num_rows, want.partials.shape)
        assert work.partials.is_contiguous()
        assert work.partial_lse.shape == want.partial_lse.shape


@pytest.mark.parametrize("rule", [{"gamma": 0.8}, {"counts": [3, 5]}])
def test_the_reference_layer_is_the_layer(device, rule):
    """Prompt, then token by token over a page border: summaries and lists equal, outputs close."""
    q, kv = make_case([900, 68, 0], GEOMETRY, device=device)
    if "counts" in rule:
        rule = {"counts": torch.tensor(rule["counts"], dtype=torch.int32, device=device)}
    layers = [layer_class.allocate(kv, 6) for layer_class in (DecodeLayer, ReferenceLayer)]
    for layer in layers:
        layer.prefill(kv, kv.block_table[0, :14].contiguous())
    for n in (63, 64, 65):
        kv.seq_lens[1] = n
        a, b = (layer.run(3 * q, kv, softmax_scale=0.2, **rule) for layer in layers)
        assert torch.equal(layers[0].pages.lengths, layers[1].pages.lengths)
        truth, _ = attention.reference(3 * q, kv, layers[1].pages, 0.2)
        assert_close(a, truth, b)
    page = kv.block_table[1, 0]
    assert (layers[0].summaries.mean[page] - layers[1].summaries.mean[page]).abs().max() < 1e-2


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


@pytest.mark.gpu
@pytest.mark.parametrize("partition", ["balanced", "eq4"])
def test_batches_of_every_size_over_shared_buffers(partition):
    """As the vLLM plugin runs it: two layers over one set of buffers, batches smaller than it."""
    q, kv = make_case([5000, 300, 64, 1, 777, 4096, 9000, 128, 65], Geometry(32, 8, 128), device="cuda")
    first = DecodeLayer.allocate(kv, 32, batch=20, partition=partition)
    layers = (first, first.sibling(kv))
    for layer in layers:
        layer.prefill(kv, full_pages(kv))
    for rows in range(1, 10):
        part = PagedKV(kv.k, kv.v, kv.block_table[:rows], kv.seq_lens[:rows])
        for layer in layers:
            out = torch.full_like(q, float("nan"))[:rows]
            layer.run(3 * q[:rows], part, gamma=0.9, out=out)
            lists = RaggedPages(
                *(t[:rows] for t in (layer.pages.page_ids, layer.pages.lengths, layer.pages.last_page_len))
            )
            truth, _ = attention.reference(3 * q[:rows], part, lists)
            assert_close(out, truth, attention.reference(3 * q[:rows], part, lists, dtype=q.dtype)[0])


@pytest.mark.parametrize("partition", ["balanced", "eq4"])
def test_few_batches_need_kernels_of_their_own(partition):
    """What a server compiles at its start: one batch for each value covers all."""
    _, kv = make_case([64], Geometry(32, 8, 128))
    layer = DecodeLayer.allocate(kv, 32, batch=256, partition=partition)
    values = [layer.compiled_for(batch) for batch in range(1, 257)]
    assert len(set(values)) <= 20
    assert len(set(values[127:256])) <= 3
