"""Merge: combine the partial results of a row's chunks through their log-sum-exp (LSE).

With partial outputs o_j (each already normalised) and LSEs l_j (natural log),

    l = log sum_j exp(l_j),        o = sum_j exp(l_j - l) o_j.

A partial with l_j = -inf is empty and never contributes, whatever its o_j holds. Partials and LSEs are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from moira_kernels import slices
from moira_kernels.device import use_pdl

LN2 = tl.constexpr(0.6931471805599453)
MAX_VALUES = 4096
"""Float32 values of partials that a merging thread block loads at once: 32 registers of 4 warps."""


def reference(partials: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partials [.., m, D] with LSEs [.., m] into (output [.., D], LSE [..]), float32.

    With every partial empty the output is 0 and the LSE -inf.
    """
    lse = lse.float()
    # Weights relative to the largest LSE and normalised by their own sum: exp(l_j - l) would carry the rounding of l.
    weight = torch.exp(lse - lse.amax(-1, keepdim=True)).nan_to_num(nan=0.0)
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1.0)
    used = torch.where(weight[..., None] > 0, partials.float(), 0.0)
    return (weight[..., None] * used).sum(-2), lse.logsumexp(-1)


@triton.jit
def row_chunks(length, MIN_CHUNK: tl.constexpr, BLOCKS_PER_ROW: tl.constexpr):
    """(c_b, number of chunks) of a row that lists ``length`` pages, Equation (4). Attend and Merge both call this."""
    chunk = tl.maximum(MIN_CHUNK, tl.cdiv(length, BLOCKS_PER_ROW))
    return chunk, tl.cdiv(length, chunk)


@triton.jit
def _merge_pieces(
    partial_ptr,  # of this row's first merged query head
    partial_lse_ptr,
    first_slot,  # slot of piece 0; piece j > 0 is in slot second_slot + (j - 1) * slot_step
    second_slot,
    slot_step,
    pieces,
    heads,  # query heads to merge, at most HEADS
    out_ptr,
    lse_ptr,
    stride_out_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write query heads of a row from its ``pieces`` partials, TILE at a time, always in the order of j."""
    offset = tl.arange(0, TILE)
    g = tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    running_max = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for first in range(0, pieces, TILE):
        j = first + offset
        slot = tl.where(j == 0, first_slot, second_slot + (j - 1) * slot_step)
        head = slot[:, None] * GROUP + g[None, :]
        listed = (j < pieces)[:, None] & (g[None, :] < heads)
        lse = tl.load(partial_lse_ptr + head, mask=listed, other=-float("inf"))
        partial = tl.load(
            partial_ptr + head[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=listed[:, :, None] & (d[None, None, :] < HEAD_DIM),
            other=0.0,
        )
        partial = tl.where((lse > -float("inf"))[:, :, None], partial, 0.0)
        new_max = tl.maximum(running_max, tl.max(lse, 0))
        safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        weight = tl.exp2(lse - safe_max[None, :])
        correction = tl.exp2(running_max - safe_max)
        total = total * correction + tl.sum(weight, 0)
        acc = acc * correction[:, None] + tl.sum(weight[:, :, None] * partial, 0)
        running_max = new_max
    safe_total = tl.where(total > 0, total, 1.0)
    out = acc / safe_total[:, None]
    lse = tl.where(total > 0, running_max + tl.log2(safe_total), -float("inf"))
    wanted = (g[:, None] < heads) & (d[None, :] < HEAD_DIM)
    tl.store(out_ptr + g[:, None] * stride_out_head + d[None, :], out.to(out_ptr.dtype.element_ty), mask=wanted)
    tl.store(lse_ptr + g, lse * LN2, mask=g < heads)


@triton.jit
def _merge_eq4_kernel(
    partial_ptr,  # [rows, J, G, D] float32
    partial_lse_ptr,  # [rows, J, G] float32, base 2
    lengths_ptr,  # [rows] int32
    out_ptr,
    lse_ptr,  # [rows, G] float32
    stride_out_batch,
    stride_out_head,
    NUM_LISTS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, chunks = row_chunks(tl.load(lengths_ptr + row), MIN_CHUNK, BLOCKS_PER_ROW)
    if chunks <= 1:  # Attend has written the row itself
        return
    g = tl.program_id(1) * HEADS
    slot = row * BLOCKS_PER_ROW
    _merge_pieces(
        partial_ptr + g * HEAD_DIM,
        partial_lse_ptr + g,
        slot,
        slot + 1,
        1,
        chunks,
        GROUP - g,
        out_ptr + (row // NUM_LISTS) * stride_out_batch + ((row % NUM_LISTS) * GROUP + g) * stride_out_head,
        lse_ptr + row * GROUP + g,
        stride_out_head,
        GROUP,
        HEADS,
        HEAD_DIM,
        BLOCK_D,
        TILE,
    )


@triton.jit(do_not_specialize=["num_rows"])  # it differs from step to step: no new kernel for multiples of 16
def _merge_balanced_kernel(
    partial_ptr,  # [blocks, 2, G, D] float32: of a row begun earlier, of a row that goes on
    partial_lse_ptr,  # [blocks, 2, G] float32, base 2
    lengths_ptr,  # [rows] int32
    out_ptr,
    lse_ptr,  # [rows, G] float32
    num_rows,
    stride_out_batch,
    stride_out_head,
    NUM_LISTS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ATTEND_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_PASS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    # The lengths were there before Attend let this kernel start, so all this runs beside the end of Attend.
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    total, start, stop, row, row_begin = slices.slice_and_row(
        lengths_ptr, num_rows, block, blocks, PAGE_SIZE, ATTEND_TILE, ROWS, ONE_PASS, True
    )
    row_end = row_begin + slices.tiles_of(tl.load(lengths_ptr + row), PAGE_SIZE, ATTEND_TILE)
    row = row.to(tl.int64)
    if PDL:
        gdc_wait()
    # Of a slice's rows only the last can go on in the next slice; the thread block in which it begins merges it.
    if (start < stop) & (row_begin >= start) & (row_end > stop):
        pieces = slices.block_of(row_end - 1, total, blocks) - block + 1
        g = tl.program_id(1) * HEADS
        # The first piece is this thread block's second partial, the others are the first partials of the next ones.
        _merge_pieces(
            partial_ptr + g * HEAD_DIM,
            partial_lse_ptr + g,
            2 * block + 1,
            2 * block + 2,
            2,
            pieces,
            GROUP - g,
            out_ptr + (row // NUM_LISTS) * stride_out_batch + ((row % NUM_LISTS) * GROUP + g) * stride_out_head,
            lse_ptr + row * GROUP + g,
            stride_out_head,
            GROUP,
            HEADS,
            HEAD_DIM,
            BLOCK_D,
            TILE,
        )


def launch_shape(pieces: int, group: int, head_dim: int) -> tuple[int, int]:
    """(partials loaded at once, query heads) of a merging thread block, for rows of about ``pieces`` pieces.

    Twice the pieces, from 8 to 64, because a second load waits for another microsecond; fewer thread blocks with more
    query heads each, as far as registers allow.
    """
    tile = max(8, min(64, triton.next_power_of_2(2 * pieces)))
    heads = MAX_VALUES // (tile * triton.next_power_of_2(head_dim))
    return tile, max(1, min(heads, triton.next_power_of_2(group)))


def launch_eq4(
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    min_chunk_pages: int,
) -> None:
    """Merge the rows of more than one chunk on the device.

    partials [rows, J, G, D] and partial_lse [rows, J, G] float32 (base 2); lengths [B, H] int32; out [B, H_q, D]; lse
    [B, H_q] float32. Which rows have more than one chunk follows from ``lengths`` by Equation (4), as in Attend.
    """
    rows, blocks_per_row, group, head_dim = partials.shape
    tile, heads = launch_shape(blocks_per_row, group, head_dim)
    _merge_eq4_kernel[(rows, triton.cdiv(group, heads))](
        partials,
        partial_lse,
        lengths,
        out,
        lse,
        *out.stride()[:2],
        NUM_LISTS=lengths.shape[1],
        GROUP=group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCKS_PER_ROW=blocks_per_row,
        MIN_CHUNK=min_chunk_pages,
        TILE=tile,
        num_warps=4,
        num_stages=1,
    )


def launch_balanced(
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    page_size: int,
    attend_tile: int,
) -> None:
    """Merge the rows that a slice border cuts, at most one per border, so the work does not grow with the batch.

    partials [blocks, 2, G, D] and partial_lse [blocks, 2, G] float32 (base 2); lengths [B, H] int32; out [B, H_q, D];
    lse [B, H_q] float32. ``page_size`` and ``attend_tile``, both in tokens, are Attend's.
    """
    blocks, _, group, head_dim = partials.shape
    num_rows = lengths.numel()
    rows = slices.rows_at_once(num_rows)
    pdl = use_pdl(out.device)
    tile, heads = launch_shape(blocks // num_rows, group, head_dim)
    _merge_balanced_kernel[(blocks, triton.cdiv(group, heads))](
        partials,
        partial_lse,
        lengths,
        out,
        lse,
        num_rows,
        *out.stride()[:2],
        NUM_LISTS=lengths.shape[1],
        GROUP=group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        ATTEND_TILE=attend_tile,
        ROWS=rows,
        ONE_PASS=num_rows <= rows,
        TILE=tile,
        PDL=pdl,
        num_warps=4,
        num_stages=1,
        launch_pdl=pdl,
    )
