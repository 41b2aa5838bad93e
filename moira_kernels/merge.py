"""Merge: combine the partial results of a row's chunks through their log-sum-exp (LSE).

With partial outputs o_j (each already normalised) and LSEs l_j (natural log),

    l = log sum_j exp(l_j),        o = sum_j exp(l_j - l) o_j.

A partial with l_j = -inf is empty and never contributes, whatever its o_j holds. Partials and LSEs are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
def _merge_kernel(
    partial_ptr,  # [rows, J, G, D] float32
    partial_lse_ptr,  # [rows, J, G] float32
    lengths_ptr,  # [rows] int32
    out_ptr,
    lse_ptr,  # [rows, G] float32
    stride_out_batch,
    stride_out_head,
    NUM_LISTS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    _, chunks = row_chunks(tl.load(lengths_ptr + row), MIN_CHUNK, BLOCKS_PER_ROW)
    if chunks <= 1:  # Attend has written the row itself
        return
    d = tl.arange(0, BLOCK_D)
    offset_j = tl.arange(0, TILE)
    running_max = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, chunks, TILE):
        j = first + offset_j
        slot = (row * BLOCKS_PER_ROW + j) * GROUP + g
        lse = tl.load(partial_lse_ptr + slot, mask=j < chunks, other=-float("inf"))
        used = lse > -float("inf")
        partial = tl.load(
            partial_ptr + slot[:, None] * HEAD_DIM + d[None, :],
            mask=used[:, None] & (d[None, :] < HEAD_DIM),
            other=0.0,
        )
        new_max = tl.maximum(running_max, tl.max(lse, 0))
        safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        weight = tl.exp(lse - safe_max)
        correction = tl.exp(running_max - safe_max)
        total = total * correction + tl.sum(weight, 0)
        acc = acc * correction + tl.sum(weight[:, None] * partial, 0)
        running_max = new_max
    safe_total = tl.where(total > 0, total, 1.0)
    acc = acc / safe_total
    out = out_ptr + (row // NUM_LISTS) * stride_out_batch + ((row % NUM_LISTS) * GROUP + g) * stride_out_head
    tl.store(out + d, acc.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(lse_ptr + row * GROUP + g, tl.where(total > 0, running_max + tl.log(safe_total), -float("inf")))


def launch(
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    min_chunk_pages: int,
) -> None:
    """Merge the rows of more than one chunk on the device.

    partials [rows, J, G, D] and partial_lse [rows, J, G] float32; lengths [B, H] int32; out [B, H_q, D]; lse [B, H_q]
    float32. Which rows have more than one chunk follows from ``lengths`` by Equation (4), as in Attend.
    """
    rows, blocks_per_row, group, head_dim = partials.shape
    _merge_kernel[(rows, group)](
        partials,
        partial_lse,
        lengths,
        out,
        lse,
        out.stride(0),
        out.stride(1),
        NUM_LISTS=lengths.shape[1],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCKS_PER_ROW=blocks_per_row,
        MIN_CHUNK=min_chunk_pages,
        TILE=min(16, triton.next_power_of_2(blocks_per_row)),
        num_warps=4,
    )
