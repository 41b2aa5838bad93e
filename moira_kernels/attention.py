"""Attend: exact attention of one decode token over the listed pages, each row's list as long as it is.

For query head g of a row with listed keys k_i and values v_i and softmax scale s,

    o_g = sum_i exp(s q_g . k_i - l_g) v_i,        l_g = log sum_i exp(s q_g . k_i).

All query heads of a row share each key and value tile, so a page is read once per row. How rows are shared among
thread blocks is a partition (``moira_kernels.partition``); each thread block works out its own part from the lengths in
device memory, so there is no plan and a captured CUDA graph stays valid when the lengths change:

- ``balanced`` (the default): a fixed grid of resident thread blocks; each adds up the lengths of all rows, takes an
  equal slice of all tiles of all rows laid end to end, and walks the rows it touches.
- ``eq4``, the paper's Equation (4) and Algorithm 2: J thread blocks per row; block (b, j) takes pages j c_b to
  (j + 1) c_b - 1 of row b's list and leaves at once if there are none.

A row that one thread block holds whole is written directly, the others are merged (``moira_kernels.merge``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moira_kernels import merge, slices
from moira_kernels import partition as cuts
from moira_kernels.checks import require_tensor
from moira_kernels.device import INTERPRETED, multiprocessors, require_supported_sizes, use_pdl
from moira_kernels.layout import PagedKV, RaggedPages, check_attention_arguments

LOG2_E = 1.4426950408889634


def reference(
    q: torch.Tensor,
    kv: PagedKV,
    pages: RaggedPages,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention row by row in ``dtype`` (float32: the truth; the cache's own dtype: what PyTorch loses in it).

    q is [B, H_q, D]. Returns the output [B, H_q, D] in ``dtype`` and the LSE [B, H_q] float32 (natural log). An empty
    row gives 0 and -inf. Lengths are read on the host.
    """
    check_attention_arguments(q, kv, pages)
    scale = kv.head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    group = q.shape[1] // pages.num_lists
    lists_per_kv_head = pages.num_lists // kv.num_kv_heads
    lengths = pages.lengths.tolist()
    last_page_len = pages.last_page_len.tolist()
    for b in range(pages.batch):
        for h in range(pages.num_lists):
            ids = pages.page_ids[b, h, : lengths[b][h]].long()
            tokens = torch.ones(ids.numel() * kv.page_size, dtype=torch.bool, device=q.device)
            if ids.numel():
                tokens[(ids.numel() - 1) * kv.page_size + last_page_len[b][h] :] = False
            tokens &= (ids >= 0).repeat_interleave(kv.page_size)
            ids = ids.clamp(min=0)
            keys = kv.k[ids, h // lists_per_kv_head].flatten(0, 1)[tokens].to(dtype)
            values = kv.v[ids, h // lists_per_kv_head].flatten(0, 1)[tokens].to(dtype)
            if not len(keys):
                continue
            heads = slice(h * group, (h + 1) * group)
            logits = (q[b, heads].to(dtype) @ keys.mT) * scale
            out[b, heads] = torch.softmax(logits, dim=-1) @ values
            lse[b, heads] = logits.float().logsumexp(-1)
    return out, lse


@triton.jit
def _attend_tokens(
    q,  # [BLOCK_G, BLOCK_D]
    k_ptr,  # of this KV head
    v_ptr,
    ids_ptr,  # of this row's list
    first,  # token range of the list; a multiple of TILE where pages are multiples of TILE
    end,
    scale_log2,
    stride_k_page,
    stride_k_token,
    stride_v_page,
    stride_v_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attention over tokens [first, end) of one list: (output [BLOCK_G, BLOCK_D] float32, LSE [BLOCK_G] in base 2)."""
    t = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    k_offset = t[:, None] * stride_k_token + d[None, :]
    v_offset = t[:, None] * stride_v_token + d[None, :]
    running_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, end, TILE):
        if PAGE_SIZE % TILE == 0:
            # One page holds the tile: a scalar address, and offsets within the tile that do not change.
            page = tl.load(ids_ptr + start // PAGE_SIZE).to(tl.int64)
            slot = start % PAGE_SIZE
            k_tile = k_ptr + page * stride_k_page + slot * stride_k_token + k_offset
            v_tile = v_ptr + page * stride_v_page + slot * stride_v_token + v_offset
            # A negative id is skipped: it makes the tile empty.
            valid = t < tl.where(page >= 0, end - start, 0)
        else:
            token = start + t
            pages = tl.load(ids_ptr + token // PAGE_SIZE, mask=token < end, other=-1).to(tl.int64)
            slots = token % PAGE_SIZE
            k_tile = k_ptr + (pages * stride_k_page + slots * stride_k_token)[:, None] + d[None, :]
            v_tile = v_ptr + (pages * stride_v_page + slots * stride_v_token)[:, None] + d[None, :]
            valid = pages >= 0
        mask = valid[:, None] if HEAD_DIM == BLOCK_D else valid[:, None] & (d[None, :] < HEAD_DIM)
        # Loads are masked, not only scores: 0 x NaN is NaN.
        k = tl.load(k_tile, mask=mask, other=0.0)
        v = tl.load(v_tile, mask=mask, other=0.0)
        if INTERPRETED:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp2(scores - safe_max[:, None])
        correction = tl.exp2(running_max - safe_max)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        running_max = new_max
    safe_total = tl.where(total > 0, total, 1.0)
    return acc / safe_total[:, None], tl.where(total > 0, running_max + tl.log2(safe_total), -float("inf"))


@triton.jit
def _load_q(q_ptr, g, d, stride_q_head, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Queries of one list, [BLOCK_G, BLOCK_D]; the padding is zero."""
    mask = (g[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + g[:, None] * stride_q_head + d[None, :], mask=mask, other=0.0)
    if INTERPRETED:  # the interpreter multiplies the bit patterns of bf16 operands
        q = q.to(tl.float32)
    return q


@triton.jit
def _store_output(
    out_ptr, lse_ptr, out, lse_log2, g, d, stride_head, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SCALE: tl.constexpr
):
    """Write [BLOCK_G, BLOCK_D] outputs and their LSEs times SCALE, without the padding."""
    mask = (g[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
    tl.store(out_ptr + g[:, None] * stride_head + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + g, lse_log2 * SCALE, mask=g < GROUP)


@triton.jit
def _attend_eq4_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_ids_ptr,
    lengths_ptr,  # [rows] int32
    last_page_len_ptr,  # [rows] int32
    out_ptr,
    lse_ptr,  # [rows, G] float32
    partial_ptr,  # [rows, J, G, D] float32
    partial_lse_ptr,  # [rows, J, G] float32, base 2
    scale_log2,  # softmax scale * log2(e): the loop works in powers of two
    stride_q_batch,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    stride_ids_batch,
    stride_ids_head,
    stride_out_batch,
    stride_out_head,
    NUM_LISTS: tl.constexpr,
    LISTS_PER_KV_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    chunk, chunks = merge.row_chunks(length, MIN_CHUNK, BLOCKS_PER_ROW)
    # An empty row has no chunk; its first thread block stays to write the zeros.
    if j >= tl.maximum(chunks, 1):
        return
    batch = row // NUM_LISTS
    list_head = row % NUM_LISTS
    kv_head = list_head // LISTS_PER_KV_HEAD
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    q_row = q_ptr + batch * stride_q_batch + list_head * GROUP * stride_q_head
    q = _load_q(q_row, g, d, stride_q_head, GROUP, HEAD_DIM, INTERPRETED)
    row_tokens = (length - 1) * PAGE_SIZE + tl.load(last_page_len_ptr + row)
    first = j * chunk * PAGE_SIZE
    out, lse = _attend_tokens(
        q,
        k_ptr + kv_head * stride_k_head,
        v_ptr + kv_head * stride_v_head,
        page_ids_ptr + batch * stride_ids_batch + list_head * stride_ids_head,
        first,
        tl.minimum(first + chunk * PAGE_SIZE, row_tokens),
        scale_log2,
        stride_k_page,
        stride_k_token,
        stride_v_page,
        stride_v_token,
        HEAD_DIM,
        BLOCK_G,
        BLOCK_D,
        PAGE_SIZE,
        TILE,
        INTERPRETED,
    )
    if chunks <= 1:
        out_row = out_ptr + batch * stride_out_batch + list_head * GROUP * stride_out_head
        _store_output(out_row, lse_ptr + row * GROUP, out, lse, g, d, stride_out_head, GROUP, HEAD_DIM, merge.LN2)
    else:
        part = (row * BLOCKS_PER_ROW + j) * GROUP
        _store_output(
            partial_ptr + part * HEAD_DIM, partial_lse_ptr + part, out, lse, g, d, HEAD_DIM, GROUP, HEAD_DIM, 1.0
        )


@triton.jit(do_not_specialize=["num_rows"])  # it differs from step to step: no new kernel for multiples of 16
def _attend_balanced_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_ids_ptr,
    lengths_ptr,  # [rows] int32
    last_page_len_ptr,  # [rows] int32
    out_ptr,
    lse_ptr,  # [rows, G] float32
    partial_ptr,  # [blocks, 2, G, D] float32: of a row begun earlier, of a row that goes on
    partial_lse_ptr,  # [blocks, 2, G] float32, base 2
    num_rows,
    scale_log2,
    stride_q_batch,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    stride_ids_batch,
    stride_ids_head,
    stride_out_batch,
    stride_out_head,
    NUM_LISTS: tl.constexpr,
    LISTS_PER_KV_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_PASS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    _, start, stop, row, row_begin = slices.slice_and_row(
        lengths_ptr, num_rows, block, tl.num_programs(0), PAGE_SIZE, TILE, ROWS, ONE_PASS, False
    )
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    while row_begin < stop:
        length = tl.load(lengths_ptr + row)
        row_end = row_begin + slices.tiles_of(length, PAGE_SIZE, TILE)
        batch = (row // NUM_LISTS).to(tl.int64)
        list_head = row % NUM_LISTS
        kv_head = (list_head // LISTS_PER_KV_HEAD).to(tl.int64)
        q_row = q_ptr + batch * stride_q_batch + list_head * GROUP * stride_q_head
        q = _load_q(q_row, g, d, stride_q_head, GROUP, HEAD_DIM, INTERPRETED)
        row_tokens = (length - 1) * PAGE_SIZE + tl.load(last_page_len_ptr + row)
        out, lse = _attend_tokens(
            q,
            k_ptr + kv_head * stride_k_head,
            v_ptr + kv_head * stride_v_head,
            page_ids_ptr + batch * stride_ids_batch + list_head * stride_ids_head,
            tl.maximum(start - row_begin, 0) * TILE,
            tl.minimum((stop - row_begin) * TILE, row_tokens),
            scale_log2,
            stride_k_page,
            stride_k_token,
            stride_v_page,
            stride_v_token,
            HEAD_DIM,
            BLOCK_G,
            BLOCK_D,
            PAGE_SIZE,
            TILE,
            INTERPRETED,
        )
        begins = row_begin >= start
        if begins & (row_end <= stop):
            out_row = out_ptr + batch * stride_out_batch + list_head * GROUP * stride_out_head
            _store_output(
                out_row, lse_ptr + row.to(tl.int64) * GROUP, out, lse, g, d, stride_out_head, GROUP, HEAD_DIM, merge.LN2
            )
        else:
            part = (2 * block + begins.to(tl.int32)) * GROUP
            _store_output(
                partial_ptr + part * HEAD_DIM, partial_lse_ptr + part, out, lse, g, d, HEAD_DIM, GROUP, HEAD_DIM, 1.0
            )
        row_begin = row_end
        row += 1


@dataclass(frozen=True)
class LaunchShape:
    """How Attend is launched: a pure function of static shape and device, never of lengths.

    Attributes:
        tile: tokens per iteration.
        num_warps, num_stages: of a thread block.
        blocks_per_multiprocessor: thread blocks that stay resident together.
    """

    tile: int = 32
    num_warps: int = 2
    num_stages: int = 3
    blocks_per_multiprocessor: int = 4


def launch_shape(head_dim: int, shared_bytes: int) -> LaunchShape:
    """The launch for D = ``head_dim`` on a device with ``shared_bytes`` of shared memory per multiprocessor.

    Two tiles of keys and values are in flight per thread block; as many thread blocks as fit, at most four (more spill
    registers, and fewer leave the memory idle).
    """
    shape = LaunchShape()
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Two stages of K and V, the queries and what the reductions exchange; 1 KiB per block is the system's.
    need = 2 * 2 * shape.tile * block_d * 2 + 16 * block_d * 2 + 2048
    most = 4 if block_d <= 128 else 2
    return replace(shape, blocks_per_multiprocessor=max(1, min(most, shared_bytes // need)))


@dataclass(frozen=True)
class Workspace:
    """Scratch of one attend() shape, allocated once so that nothing is allocated on the decode path.

    Launches that share a workspace must not overlap.

    Attributes:
        partition: 'balanced' or 'eq4'.
        blocks: thread blocks of the grid (balanced) or per row (eq4).
        partials: [blocks, 2, G, D] (balanced) or [rows, blocks, G, D] (eq4) float32, partial outputs.
        partial_lse: the same without D, float32, base 2.
        lse: [B, H_q] float32.
    """

    partition: str
    blocks: int
    num_rows: int
    partials: torch.Tensor
    partial_lse: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(
        cls,
        batch: int,
        num_heads: int,
        num_lists: int,
        head_dim: int,
        device: torch.device,
        partition: str = "balanced",
        blocks: int | None = None,
    ) -> Workspace:
        """Scratch for B = ``batch``, H_q = ``num_heads``, H = ``num_lists`` lists per request.

        ``blocks`` is the number of resident thread blocks of the device (balanced) or J of Equation (4) (eq4) if None.
        """
        rows, group = batch * num_lists, num_heads // num_lists
        if partition == "balanced":
            blocks = blocks or resident_blocks(head_dim, device)
            shape = (blocks, 2, group)
        elif partition == "eq4":
            blocks = blocks or cuts.eq4_blocks_per_row(rows)
            shape = (rows, blocks, group)
        else:
            raise ValueError(f"partition: expected 'balanced' or 'eq4', got {partition!r}")
        return cls(
            partition,
            blocks,
            rows,
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty((batch, num_heads), dtype=torch.float32, device=device),
        )


def resident_blocks(head_dim: int, device: torch.device) -> int:
    """Thread blocks that the device holds at once; four in the interpreter, where they run one after another."""
    if device.type != "cuda":
        return 4
    shape = launch_shape(head_dim, torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
    return shape.blocks_per_multiprocessor * multiprocessors(device)


def attend(
    q: torch.Tensor,
    kv: PagedKV,
    pages: RaggedPages,
    *,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one decode step over any selector's page lists, on the device, without host work.

    Args:
        q: [B, H_q, D], same dtype as the cache; any batch and head stride.
        kv: the paged cache; page sizes 1 to 128, D up to 256.
        pages: the lists; H = H_kv (shared by a group) up to H = H_q (one each), at most 16 query heads a list.
        softmax_scale: 1/sqrt(D) if None.
        out: [B, H_q, D] to write into; allocated if None.
        workspace: scratch from ``Workspace.allocate``; allocated if None. Pass it to capture a CUDA graph.
        return_lse: also return the LSE [B, H_q] float32, natural log.

    Raises:
        ValueError: arguments that do not fit together.
        UnsupportedError: a device, head dimension, group or page size outside the limits.
    """
    check_attention_arguments(q, kv, pages)
    require_supported_sizes(q.device, q.shape[1] // pages.num_lists, kv)
    batch, num_heads, head_dim = q.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        require_tensor("out", out, tuple(q.shape), q.dtype, q.device)
    if workspace is None:
        workspace = Workspace.allocate(batch, num_heads, pages.num_lists, head_dim, q.device)
    group = num_heads // pages.num_lists
    made_for, got = (workspace.num_rows, *workspace.partials.shape[2:]), (pages.num_rows, group, head_dim)
    if made_for != got:
        raise ValueError(f"workspace: made for (rows, query heads per list, D) = {made_for}, got {got}")
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    shape = LaunchShape()
    pointers = (q, kv.k, kv.v, pages.page_ids, pages.lengths, pages.last_page_len, out, workspace.lse)
    scratch = (workspace.partials, workspace.partial_lse)
    strides = (
        *q.stride()[:2],
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        *pages.page_ids.stride()[:2],
        *out.stride()[:2],
    )
    options = {
        "NUM_LISTS": pages.num_lists,
        "LISTS_PER_KV_HEAD": pages.num_lists // kv.num_kv_heads,
        "GROUP": group,
        "BLOCK_G": 16,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "PAGE_SIZE": kv.page_size,
        "TILE": shape.tile,
        "INTERPRETED": INTERPRETED,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    }
    scale_log2 = scale * LOG2_E
    if workspace.partition == "eq4":
        min_chunk = cuts.eq4_min_chunk_pages(kv.page_size)
        options |= {"BLOCKS_PER_ROW": workspace.blocks, "MIN_CHUNK": min_chunk}
        grid = (pages.num_rows, workspace.blocks)
        _attend_eq4_kernel[grid](*pointers, *scratch, scale_log2, *strides, **options)
        merge.launch_eq4(*scratch, pages.lengths, out, workspace.lse, min_chunk)
    else:
        rows = slices.rows_at_once(pages.num_rows)
        pdl = use_pdl(q.device)
        options |= {"ROWS": rows, "ONE_PASS": pages.num_rows <= rows, "PDL": pdl, "launch_pdl": pdl}
        _attend_balanced_kernel[(workspace.blocks,)](
            *pointers, *scratch, pages.num_rows, scale_log2, *strides, **options
        )
        merge.launch_balanced(*scratch, pages.lengths, out, workspace.lse, kv.page_size, shape.tile)
    return (out, workspace.lse) if return_lse else out
