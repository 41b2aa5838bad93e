"""Merge: combine the partial results of a row's chunks through their log-sum-exp (LSE).

With partial outputs o_j (each already normalised) and LSEs l_j (natural log),

    l = log sum_j exp(l_j),        o = sum_j exp(l_j - l) o_j.

A partial with l_j = -inf is empty and never contributes, whatever its o_j holds. Partials and LSEs are float32.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

LN2 = tl.constexpr(0.6931471805599453)
MAX_VALUES = 16384
"""Float32 values of partials that a merging thread block holds at once: 64 registers of 8 warps."""


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
def slice_of(block, total, blocks):
    """[start, stop) of a thread block when ``total`` units are shared evenly; the first total % blocks get one more."""
    size = total // blocks
    extra = total % blocks
    start = block * size + tl.minimum(block, extra)
    return start, start + size + (block < extra).to(tl.int32)


@triton.jit
def block_of(unit, total, blocks):
    """The thread block whose slice holds ``unit``: the inverse of ``slice_of``."""
    size = total // blocks
    extra = total % blocks
    in_larger = extra * (size + 1)
    return tl.where(unit < in_larger, unit // (size + 1), extra + (unit - in_larger) // tl.maximum(size, 1))


@triton.jit
def _add_pieces(
    running_max,  # [BLOCK_G]
    total,
    acc,  # [BLOCK_G, BLOCK_D]
    partial_ptr,
    partial_lse_ptr,
    first,
    pieces,
    first_slot,
    second_slot,
    slot_step,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold pieces first .. first + TILE - 1 into the running maximum, sum of weights and weighted sum."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    j = first + tl.arange(0, TILE)
    slot = tl.where(j == 0, first_slot, second_slot + (j - 1) * slot_step)
    head = slot[:, None] * GROUP + g[None, :]
    listed = (j < pieces)[:, None] & (g[None, :] < GROUP)
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
    return new_max, total, acc


@triton.jit
def _merge_pieces(
    partial_ptr,
    partial_lse_ptr,
    first_slot,  # slot of piece 0; piece j > 0 is in slot second_slot + (j - 1) * slot_step
    second_slot,
    slot_step,
    pieces,
    out_ptr,  # of the row's first query head
    lse_ptr,
    stride_out_head,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write a row from its ``pieces`` partials, TILE at a time, always in the order of j."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    running_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    # The first tile, nearly always the only one, stands outside the loop: inside it costs 1 us more.
    running_max, total, acc = _add_pieces(
        running_max,
        total,
        acc,
        partial_ptr,
        partial_lse_ptr,
        0,
        pieces,
        first_slot,
        second_slot,
        slot_step,
        GROUP,
        BLOCK_G,
        HEAD_DIM,
        BLOCK_D,
        TILE,
    )
    for first in range(TILE, pieces, TILE):
        running_max, total, acc = _add_pieces(
            running_max,
            total,
            acc,
            partial_ptr,
            partial_lse_ptr,
            first,
            pieces,
            first_slot,
            second_slot,
            slot_step,
            GROUP,
            BLOCK_G,
            HEAD_DIM,
            BLOCK_D,
            TILE,
        )
    safe_total = tl.where(total > 0, total, 1.0)
    out = acc / safe_total[:, None]
    lse = tl.where(total > 0, running_max + tl.log2(safe_total), -float("inf"))
    wanted = (g[:, None] < GROUP) & (d[None, :] < HEAD_DIM)
    tl.store(out_ptr + g[:, None] * stride_out_head + d[None, :], out.to(out_ptr.dtype.element_ty), mask=wanted)
    tl.store(lse_ptr + g, lse * LN2, mask=g < GROUP)


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
    BLOCK_G: tl.constexpr,
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
    slot = row * BLOCKS_PER_ROW
    out = out_ptr + (row // NUM_LISTS) * stride_out_batch + (row % NUM_LISTS) * GROUP * stride_out_head
    lse = lse_ptr + row * GROUP
    _merge_pieces(
        partial_ptr,
        partial_lse_ptr,
        slot,
        slot + 1,
        1,
        chunks,
        out,
        lse,
        stride_out_head,
        GROUP,
        BLOCK_G,
        HEAD_DIM,
        BLOCK_D,
        TILE,
    )


@triton.jit
def _merge_balanced_kernel(
    partial_ptr,  # [blocks, 2, G, D] float32
    partial_lse_ptr,  # [blocks, 2, G] float32, base 2
    cut_rows_ptr,  # [blocks, 2] int32
    out_ptr,
    lse_ptr,  # [rows, G] float32
    stride_out_batch,
    stride_out_head,
    NUM_LISTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    block = tl.program_id(0)
    row = tl.load(cut_rows_ptr + 2 * block).to(tl.int64)
    pieces = tl.load(cut_rows_ptr + 2 * block + 1)
    if pieces == 0:  # no row that begins in this thread block goes on in the next
        return
    # The first piece is this thread block's second partial, the others are the first partials of the next ones.
    slot = 2 * block
    out = out_ptr + (row // NUM_LISTS) * stride_out_batch + (row % NUM_LISTS) * GROUP * stride_out_head
    lse = lse_ptr + row * GROUP
    _merge_pieces(
        partial_ptr,
        partial_lse_ptr,
        slot + 1,
        slot + 2,
        2,
        pieces,
        out,
        lse,
        stride_out_head,
        GROUP,
        BLOCK_G,
        HEAD_DIM,
        BLOCK_D,
        TILE,
    )


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
    tile, warps = launch_shape(blocks_per_row, group, head_dim)
    _merge_eq4_kernel[(rows,)](
        partials,
        partial_lse,
        lengths,
        out,
        lse,
        *out.stride()[:2],
        NUM_LISTS=lengths.shape[1],
        GROUP=group,
        BLOCK_G=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCKS_PER_ROW=blocks_per_row,
        MIN_CHUNK=min_chunk_pages,
        TILE=tile,
        num_warps=warps,
        num_stages=1,
    )


def launch_shape(pieces: int, group: int, head_dim: int) -> tuple[int, int]:
    """(partials loaded at once, warps) for rows of about ``pieces`` pieces: twice as many if registers allow, from 4."""
    heads = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    tile = max(4, min(triton.next_power_of_2(2 * pieces), MAX_VALUES // heads))
    return tile, 8 if tile * heads > MAX_VALUES // 2 else 4


def launch_balanced(
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    cut_rows: torch.Tensor,
    num_lists: int,
    num_rows: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge the rows that a slice border cuts, at most one per border, so the work does not grow with the batch.

    partials [blocks, 2, G, D] and partial_lse [blocks, 2, G] float32 (base 2), cut_rows [blocks, 2] int32 as Attend
    leaves them; out [B, H_q, D]; lse [B, H_q] float32.
    """
    blocks, _, group, head_dim = partials.shape
    pdl = use_pdl(out.device)
    tile, warps = launch_shape(blocks // num_rows, group, head_dim)
    _merge_balanced_kernel[(blocks,)](
        partials,
        partial_lse,
        cut_rows,
        out,
        lse,
        *out.stride()[:2],
        NUM_LISTS=num_lists,
        GROUP=group,
        BLOCK_G=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        TILE=tile,
        PDL=pdl,
        num_warps=warps,
        num_stages=1,
        launch_pdl=pdl,
    )


@cache
def use_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch (sm_90 and newer): the next kernel's thread blocks start while the last ones of
    this kernel finish, and wait for its results.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
