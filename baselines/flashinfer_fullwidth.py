"""FlashInfer tensor-core paged decode under one plan for rows of full width; lists are rewritten on the device.

The plan is made once, for rows that keep every page, and a graph can hold it. ``run`` writes this step's lists into the
buffers that the plan points to (one kernel, timed) and attends. The result is right because the kernel takes lengths
from those buffers: of a row's planned chunks, those past its end read nothing and merge as empty, and with one query
token a partial's place depends on the plan alone. What suffers is the balance: chunks are as long as full rows need, so
short rows are one chunk each and most thread blocks have no work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baselines import Attention, flashinfer_decode
from baselines.sequences import Rows
from moira_kernels.layout import RaggedPages

KIND = "attention"
NEEDS = ("cuda", "flashinfer")


@triton.jit
def _compress_kernel(
    page_ids_ptr,
    lengths_ptr,  # [rows] int32
    last_page_len_ptr,  # [rows] int32
    indptr_ptr,  # [rows + 1] int32
    indices_ptr,
    last_page_len_out_ptr,
    num_rows,
    factor,
    stride_ids_batch,
    stride_ids_head,
    NUM_LISTS: tl.constexpr,
    LISTS_PER_KV_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
):
    row = tl.program_id(0)
    start = 0
    for first in range(0, row, ROWS):
        before = first + tl.arange(0, ROWS)
        start += tl.sum(tl.load(lengths_ptr + before, mask=before < row, other=0), 0)
    length = tl.load(lengths_ptr + row)
    tl.store(indptr_ptr + row, start)
    tl.store(indptr_ptr + num_rows, start + length, mask=row == num_rows - 1)
    tl.store(last_page_len_out_ptr + row, tl.load(last_page_len_ptr + row))
    list_head = row % NUM_LISTS
    ids_ptr = page_ids_ptr + (row // NUM_LISTS).to(tl.int64) * stride_ids_batch + list_head * stride_ids_head
    for first in range(0, length, IDS):
        i = first + tl.arange(0, IDS)
        page = tl.load(ids_ptr + i, mask=i < length, other=0)
        tl.store(indices_ptr + start + i, page * factor + list_head // LISTS_PER_KV_HEAD, mask=i < length)


def compress(
    pages: RaggedPages, num_kv_heads: int, factor: int, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor
) -> None:
    """Write the lists of all rows end to end: indptr [R + 1], indices (room for R * max_pages), last [R], all int32.

    Ids become those of one-head pages: page id * ``factor`` + KV head.
    """
    _compress_kernel[(pages.num_rows,)](
        pages.page_ids,
        pages.lengths,
        pages.last_page_len,
        indptr,
        indices,
        last,
        pages.num_rows,
        factor,
        *pages.page_ids.stride()[:2],
        NUM_LISTS=pages.num_lists,
        LISTS_PER_KV_HEAD=pages.num_lists // num_kv_heads,
        ROWS=1024,
        IDS=256,
    )


class FlashInferFullwidth(Attention):
    """One plan, B * H sequences of as many pages as the block table is wide."""

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        rows = Rows(q, self.out, kv, pages)
        self.factor = rows.factor
        num_rows, width = rows.sequences.page_table.shape
        options = {"dtype": torch.int32, "device": q.device}
        self.buffers = (
            torch.zeros(num_rows + 1, **options),
            torch.zeros(num_rows * width, **options),
            torch.zeros(num_rows, **options),
        )
        self.decode = flashinfer_decode.Decode(rows.sequences, self.buffers)
        indptr = torch.arange(num_rows + 1, dtype=torch.int32) * width
        self.decode.plan(indptr, self.buffers[1], torch.full((num_rows,), kv.page_size, dtype=torch.int32))
        self.implementation = flashinfer_decode.name()

    def run(self) -> None:
        """Write the lists, then attend."""
        compress(self.pages, self.kv.num_kv_heads, self.factor, *self.buffers)
        self.decode()


ARM = FlashInferFullwidth
