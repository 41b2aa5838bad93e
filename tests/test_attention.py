"""Attend and Merge against the float32 reference: in Triton's interpreter on a CPU, compiled on a GPU."""

import math
import sys

import pytest
import torch

from moira_kernels import PagedKV, RaggedPages, UnsupportedError, Workspace, attend, attention, selection, slices
from moira_kernels.testing import Geometry, assert_close, bf16_ulp, make_case, max_abs_error, poison

BLOCKS = {"balanced": 7, "eq4": 4}
"""Thread blocks (of the grid, per row) in most tests: few, since the interpreter runs them one after another."""


@pytest.fixture(params=BLOCKS, autouse=True)
def partition(request, monkeypatch):
    """Every test runs with both partitions."""
    monkeypatch.setattr(sys.modules[__name__], "PARTITION", request.param)
    return request.param


PARTITION = None


def random_lists(q, kv, seed=0, num_lists=None, share=0.6):
    """Random lists with the first and the current page."""
    generator = torch.Generator().manual_seed(seed)
    num_lists = num_lists or kv.num_kv_heads
    keep = torch.rand(kv.batch, num_lists, kv.max_pages, generator=generator) < share
    last = (kv.num_pages() - 1).clamp(min=0).long().cpu()
    keep[:, :, 0] = True
    keep.scatter_(2, last[:, None, None].expand(-1, num_lists, 1), True)
    return selection.compact(keep.to(q.device), kv)


def allocate(q, kv, pages, blocks=None):
    blocks = blocks or BLOCKS[PARTITION]
    return Workspace.allocate(kv.batch, q.shape[1], pages.num_lists, kv.head_dim, q.device, PARTITION, blocks)


def run(q, kv, pages, blocks=None, **options):
    workspace = allocate(q, kv, pages, blocks)
    for tensor in (workspace.partials, workspace.partial_lse, workspace.lse):
        tensor.fill_(float("nan"))
    out = torch.full_like(q, float("nan"))
    result = attend(q, kv, pages, out=out, workspace=workspace, return_lse=True, **options)
    assert result[0] is out
    return result


def check(q, kv, pages, **options):
    """Poison what no list names, run, compare output and LSE; returns the output."""
    truth, truth_lse = attention.reference(q, kv, pages, options.get("softmax_scale"))
    low, _ = attention.reference(q, kv, pages, options.get("softmax_scale"), dtype=q.dtype)
    poison(kv, pages)
    out, lse = run(q, kv, pages, **options)
    assert_close(out, truth, low)
    torch.testing.assert_close(lse, truth_lse, rtol=1e-5, atol=2e-5 if q.dtype == torch.float32 else 1e-2)
    return out


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ragged_lists_with_padding_rows_b1_b2(device, layout, dtype):
    q, kv = make_case([200, 64, 0, 1, 400], Geometry(8, 2, 64), layout=layout, dtype=dtype, device=device)
    out = check(q, kv, random_lists(q, kv))
    assert (out[2] == 0).all()


def test_only_padding_rows_b2(device):
    q, kv = make_case([0, 0], Geometry(4, 2, 32), device=device)
    for table in (0, -1):
        kv.block_table.fill_(table)
        out, lse = run(q, kv, random_lists(q, kv))
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12, 14, 16])
def test_any_group_d1(device, group):
    q, kv = make_case([70, 130], Geometry(2 * group, 2, 32), device=device, seed=group)
    check(q, kv, random_lists(q, kv, group))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_any_head_dim_d3(device, head_dim):
    """Only the last channel of the query is set and only token 7 answers it; V past D must not enter K."""
    q, kv = make_case([40], Geometry(2, 1, head_dim), device=device)
    q.zero_()
    q[..., -1] = 1.0
    kv.k[:, :, :, -1] = 0
    kv.v.mul_(1e4)
    page = int(kv.block_table[0, 0])
    kv.k[page, 0, 7, -1] = 50 * head_dim**0.5
    out, _ = run(q, kv, random_lists(q, kv))
    assert torch.equal(out[0, 0], kv.v[page, 0, 7])


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 48, 128])
def test_any_page_size(device, page_size):
    q, kv = make_case([150, 3], Geometry(4, 2, 32), page_size=page_size, device=device)
    check(q, kv, random_lists(q, kv))


def test_one_list_per_query_head(device):
    q, kv = make_case([300, 90], Geometry(6, 2, 32), device=device)
    pages = random_lists(q, kv, num_lists=6)
    truth, _ = attention.reference(q, kv, pages)
    low, _ = attention.reference(q, kv, pages, dtype=q.dtype)
    assert_close(run(q, kv, pages)[0], truth, low)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_tail_of_the_last_page_is_never_read_b6(device, value):
    q, kv = make_case([65], Geometry(2, 1, 32), device=device)
    pages = random_lists(q, kv)
    page = kv.block_table[0, 1].long()
    kv.k[page, :, 1:] = kv.v[page, :, 1:] = 0
    clean = run(q, kv, pages)[0].clone()
    kv.k[page, :, 1:] = kv.v[page, :, 1:] = value
    assert torch.equal(run(q, kv, pages)[0], clean)


def test_entries_past_the_length_are_never_read_a7_b4(device):
    q, kv = make_case([400, 257], Geometry(2, 1, 32), device=device)
    pages = random_lists(q, kv)
    clean = run(q, kv, pages)[0].clone()
    beyond = torch.arange(kv.max_pages, device=device) >= pages.lengths[..., None]
    kv.k[0] = kv.v[0] = float("nan")
    for spare in (0, 2**30):
        pages.page_ids.masked_fill_(beyond, spare)
        assert torch.equal(run(q, kv, pages)[0], clean)


def test_negative_ids_are_skipped_b7(device):
    """Page size 1, 64 skipped tokens before the only real one: the first tile is masked whole."""
    q, kv = make_case([80], Geometry(2, 1, 32), page_size=1, device=device)
    ids = torch.full((1, 1, 80), -1, dtype=torch.int32, device=device)
    ids[0, 0, 70] = 5
    pages = RaggedPages(
        ids, torch.tensor([[71]], dtype=torch.int32, device=device), torch.ones(1, 1, dtype=torch.int32, device=device)
    )
    out, _ = run(q, kv, pages, blocks=1)
    assert torch.equal(out[0, 0], kv.v[5, 0, 0])


def lists_of(kv, *lengths):
    """Rows that list their first n pages."""
    column = torch.arange(kv.max_pages, device=kv.k.device)
    keep = column < torch.tensor(lengths, device=kv.k.device)[:, None, None]
    pages = selection.compact(keep.expand(-1, kv.num_kv_heads, -1).contiguous(), kv)
    return RaggedPages(pages.page_ids, pages.lengths, torch.where(pages.lengths > 0, kv.page_size, 0).int())


def test_every_number_of_chunks_has_one_writer_c2(device):
    """eq4 cuts at C = 96 sixteen-token pages: rows of 0, 1, C, C + 1 and 2C pages in one launch."""
    lengths = (0, 1, 96, 97, 192)
    q, kv = make_case([192 * 16] * 5, Geometry(2, 1, 16), page_size=16, device=device)
    check(q, kv, lists_of(kv, *lengths))


def test_chunks_are_cut_once_c4(device):
    """V counts positions modulo 16 and all keys are equal: a token dropped or counted twice changes the mean."""
    q, kv = make_case([1540], Geometry(1, 1, 16), page_size=1, dtype=torch.float32, device=device)
    kv.k.fill_(1.0)
    ids = kv.block_table[0].long()
    kv.v[ids] = (torch.arange(1540, device=device) % 16).float()[:, None, None, None].expand(-1, 1, 1, 16)
    for blocks in (1, 3, 64):
        out, _ = run(q, kv, lists_of(kv, 1540), blocks=blocks)
        torch.testing.assert_close(out, torch.full_like(out, 11526 / 1540), rtol=1e-5, atol=0)


def test_layout_and_strides_e1(device):
    """Channels 0, 1, 2 of key and value are page, token and head; one query per head points at one token."""
    for layout in ("nhd", "hnd"):
        q, kv = make_case([192], Geometry(4, 4, 16), layout=layout, device=device)
        kv.k.zero_()
        kv.v.zero_()
        for channel, dim in enumerate((0, 2, 1)):
            index = torch.arange(kv.k.shape[dim], device=device, dtype=kv.k.dtype)
            kv.v[..., channel] = index.view([-1 if d == dim else 1 for d in range(3)])
        kv.k[2, :, 33, 5] = 100.0
        q.zero_()
        q[..., 5] = 100.0
        pages = lists_of(kv, 3)
        for _ in range(2):
            out, _ = run(q, kv, pages)
            assert out[0, :, :3].tolist() == [[2, 33, head] for head in range(4)]


def test_padded_and_interleaved_storages_e2(device):
    q, kv = make_case([150, 300], Geometry(4, 2, 32), device=device)
    pages = random_lists(q, kv)
    want = run(q, kv, pages)[0].clone()
    P, H, S, D = kv.k.shape
    padded = torch.full((P, H * S * 2 * D + 4096), float("nan"), dtype=q.dtype, device=device)
    packed = padded[:, : H * S * 2 * D].view(P, H, S, 2 * D)
    outer = torch.empty(2, P, S, H, D, dtype=q.dtype, device=device)
    middle = torch.empty(P, 2, S, H, D, dtype=q.dtype, device=device)
    for k, v in (
        (packed[..., :D], packed[..., D:]),
        (outer[0].transpose(1, 2), outer[1].transpose(1, 2)),
        (middle[:, 0].transpose(1, 2), middle[:, 1].transpose(1, 2)),
    ):
        k.copy_(kv.k)
        v.copy_(kv.v)
        assert torch.equal(run(q, PagedKV(k, v, kv.block_table, kv.seq_lens), pages)[0], want)


def test_strided_query_and_output_e5(device):
    q, kv = make_case([100, 200, 70], Geometry(4, 2, 32), device=device)
    pages = random_lists(q, kv)
    want = run(q, kv, pages)[0].clone()
    fused = torch.empty(3, 8 * 32, dtype=q.dtype, device=device)
    fused[:, :128] = q.flatten(1)
    buffer = torch.full((3, 8, 32), float("nan"), dtype=q.dtype, device=device)
    attend(fused[:, :128].view(3, 4, 32), kv, pages, out=buffer[:, 2:6], workspace=allocate(q, kv, pages))
    assert torch.equal(buffer[:, 2:6], want)
    assert buffer[:, :2].isnan().all()
    assert buffer[:, 6:].isnan().all()


def test_scale_is_the_callers_f5(device):
    q, kv = make_case([100], Geometry(2, 1, 32), device=device)
    check(q, kv, random_lists(q, kv), softmax_scale=1 / 12)


def test_repeats_are_bit_identical(device):
    q, kv = make_case([900, 200], Geometry(4, 2, 32), page_size=16, device=device)
    pages = random_lists(q, kv)
    first = run(q, kv, pages)[0].clone()
    for _ in range(3):
        assert torch.equal(run(q, kv, pages)[0], first)


def test_limits_are_named(device, has_gpu):
    q, kv = make_case([70], Geometry(34, 2, 16), device=device)
    with pytest.raises(UnsupportedError, match="query heads per list 17 is not supported, the limit is 16"):
        run(q, kv, random_lists(q, kv))
    q, kv = make_case([70], Geometry(2, 2, 16), device=device)
    with pytest.raises(ValueError, match=r"workspace: made for .* = \(4, 1, 16\), got \(2, 1, 16\)"):
        attend(q, kv, random_lists(q, kv), workspace=Workspace.allocate(2, 2, 2, 16, device))
    if has_gpu:
        q, kv = make_case([70], Geometry(2, 2, 16), device="cpu")
        with pytest.raises(UnsupportedError, match="need tensors on a CUDA GPU, got cpu"):
            attend(q, kv, random_lists(q, kv))


def test_query_and_output_offsets_beyond_int32_a3(device):
    """Batch strides of 2^31 elements: 13 GB of address space each, of which three short stretches are touched."""
    q, kv = make_case([100, 200, 70], Geometry(4, 2, 32), device=device)
    pages = random_lists(q, kv)
    want = run(q, kv, pages)[0]
    far_q, far_out = (
        torch.empty(2 * 2**31 + 128, dtype=q.dtype, device=device).as_strided((3, 4, 32), (2**31, 32, 1))
        for _ in range(2)
    )
    far_q.copy_(q)
    attend(far_q, kv, pages, out=far_out, workspace=allocate(q, kv, pages))
    assert torch.equal(far_out, want)


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (1, 0, 0, 1), (3, 1, 4, 1), (12, 0, 1, 12), (0, 0, 0, 9)])
def test_slice_borders_anywhere(device, blocks, lengths):
    """More thread blocks than tiles, borders on and inside rows, empty rows first, last and between."""
    q, kv = make_case([12 * 32] * 4, Geometry(2, 1, 16), page_size=32, device=device, seed=blocks)
    check(q, kv, lists_of(kv, *lengths), blocks=blocks)


def test_more_rows_than_are_added_up_at_once(device, monkeypatch):
    """Lengths are added up in several passes."""
    monkeypatch.setattr(slices, "MAX_ROWS_AT_ONCE", 4)
    q, kv = make_case([70, 0, 200, 33, 64, 1, 0, 90, 128, 5, 300], Geometry(2, 1, 16), page_size=32, device=device)
    check(q, kv, random_lists(q, kv))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shared_kib", [100, 164, 228])
def test_launch_fits_the_device(head_dim, shared_kib):
    """Shared memory of sm_120, sm_80 and sm_90: what is resident fits, and something is."""
    shape = attention.launch_shape(head_dim, shared_kib * 1024)
    tiles = 2 * 2 * shape.tile * head_dim * 2
    assert 1 <= shape.blocks_per_multiprocessor <= 4
    assert shape.blocks_per_multiprocessor * tiles <= shared_kib * 1024


@pytest.mark.gpu
def test_page_ids_beyond_int32_offsets_a1():
    """Page stride 2^17 elements: page 16,384 starts at element 2^31."""
    geometry = Geometry(32, 8, 128)
    cache = torch.zeros(16_386, 8, 64, 256, dtype=torch.bfloat16, device="cuda")
    q, small = make_case([150], geometry, device="cuda")
    table = torch.tensor([[16_385, 0, 16_384]], dtype=torch.int32, device="cuda")
    for column, source in enumerate(small.block_table[0].tolist()):
        cache[table[0, column], :, :, :128] = small.k[source]
        cache[table[0, column], :, :, 128:] = small.v[source]
    want = attend(q, small, lists_of(small, 3))
    big = PagedKV.from_fused(cache, table, small.seq_lens)
    assert torch.equal(attend(q, big, lists_of(big, 3)), want)


@pytest.mark.gpu
def test_graph_replay_equals_eager_with_other_lists_i2(partition):
    """Captured with short lists, replayed with long, empty and short ones."""
    q, kv = make_case([20_000] * 3, Geometry(32, 8, 128), device="cuda")
    captured = lists_of(kv, 1, 2, 3)
    out, workspace = torch.empty_like(q), Workspace.allocate(3, 32, 8, 128, q.device, partition)
    fresh = Workspace.allocate(3, 32, 8, 128, q.device, partition)
    attend(q, kv, captured, out=out, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(q, kv, captured, out=out, workspace=workspace)
    for lengths in ((313, 0, 24), (25, 48, 313), (1, 1, 1), (0, 0, 0), (313, 313, 313)):
        pages = lists_of(kv, *lengths)
        for name in ("page_ids", "lengths", "last_page_len"):
            getattr(captured, name).copy_(getattr(pages, name))
        out.fill_(float("nan"))
        graph.replay()
        eager = attend(q, kv, pages, workspace=fresh)
        assert torch.equal(out, eager), lengths


@pytest.mark.gpu
def test_rows_agree_across_batches_n1():
    """Outputs may differ in rounding as the cut follows the batch; by one bf16 ulp of the largest at most."""
    q, kv = make_case([20_000] * 16, Geometry(32, 8, 128), device="cuda")
    pages = lists_of(kv, *range(300, 316))
    want = attend(q, kv, pages)
    for batch in (1, 8, 9):
        part = PagedKV(kv.k, kv.v, kv.block_table[:batch], kv.seq_lens[:batch])
        lists = RaggedPages(pages.page_ids[:batch], pages.lengths[:batch], pages.last_page_len[:batch])
        got = attend(q[:batch].contiguous(), part, lists)
        assert max_abs_error(got, want[:batch].float()) <= bf16_ulp(want.abs().max()).item()
