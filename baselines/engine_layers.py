"""The paper's FA3^c and FlashInfer^c inside vLLM: Moira's Estimate and Select, another library's attention.

A layer of the vLLM plugin whose lists are attended by FlashAttention-3, which builds its split metadata in every layer,
or by FlashInfer under one plan per batch size made for rows of full width, since it cannot plan inside a CUDA graph.
Both take a row (request, KV head) as a sequence of one KV head. One kernel writes the lists in the library's form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from baselines import fa3, flashinfer_decode
from baselines.flashinfer_fullwidth import compress
from baselines.sequences import Sequences, one_head_pages, page_factor
from moira_kernels.attention import Workspace
from moira_kernels.layout import PagedKV, RaggedPages
from moira_kernels.pipeline import DecodeLayer


@triton.jit
def _table_kernel(
    page_ids_ptr,  # [rows, width] int32
    lengths_ptr,  # [rows] int32
    last_page_len_ptr,  # [rows] int32
    table_ptr,  # [rows, width] int32
    tokens_ptr,  # [rows] int32
    width,
    factor,
    NUM_LISTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    last = tl.load(last_page_len_ptr + row)
    tl.store(tokens_ptr + row, tl.where(length > 0, (length - 1) * PAGE_SIZE + last, 0))
    for first in range(0, length, IDS):
        i = first + tl.arange(0, IDS)
        page = tl.load(page_ids_ptr + row * width + i, mask=i < length, other=0)
        tl.store(table_ptr + row * width + i, page * factor + row.to(tl.int32) % NUM_LISTS, mask=i < length)


def write_table(pages: RaggedPages, page_size: int, factor: int, table: torch.Tensor, tokens: torch.Tensor) -> None:
    """The lists as a page table [rows, width] int32 of one-head pages (page id * ``factor`` + KV head), and each row's
    tokens [rows] int32. Lists are contiguous, one per KV head.
    """
    _table_kernel[(pages.num_rows,)](
        pages.page_ids,
        pages.lengths,
        pages.last_page_len,
        table,
        tokens,
        table.shape[1],
        factor,
        NUM_LISTS=pages.num_lists,
        PAGE_SIZE=page_size,
        IDS=256,
    )


@dataclass(frozen=True)
class RowsLayer(DecodeLayer, ABC):
    """A decode layer that leaves attention to ``attend_rows``.

    Attributes:
        shared: what the layers of a model share: buffers, and one plan per batch size.
    """

    shared: dict[Any, Any] = field(default_factory=dict)

    def attend(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        pages: RaggedPages,
        workspace: Workspace,
        softmax_scale: float | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """The lists through ``attend_rows``, with 1 / sqrt(D) as the scale, whatever Estimate is given."""
        factor, rows = page_factor("cache", kv.k), pages.num_rows
        group = q.shape[1] // pages.num_lists
        sequences = Sequences(
            q.reshape(rows, group, -1),
            out.view(rows, group, -1),
            one_head_pages(kv.k, factor),
            one_head_pages(kv.v, factor),
            *self._table(rows),
        )
        self.attend_rows(sequences, kv, pages, factor)
        return out

    def _table(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(page table [rows, width], tokens [rows]) int32: the first rows of buffers that all layers share."""
        if "table" not in self.shared:
            most, width = self.pages.num_rows, self.pages.page_ids.shape[2]
            device = self.pages.page_ids.device
            self.shared["table"] = torch.zeros((most, width), dtype=torch.int32, device=device)
            self.shared["tokens"] = torch.zeros(most, dtype=torch.int32, device=device)
            self.shared["first_tokens"] = torch.arange(most + 1, dtype=torch.int32, device=device)
        return self.shared["table"][:rows], self.shared["tokens"][:rows]

    @abstractmethod
    def attend_rows(self, sequences: Sequences, kv: PagedKV, pages: RaggedPages, factor: int) -> None:
        """Attend to ``pages`` and write ``sequences.out``."""


class FA3Layer(RowsLayer):
    """FlashAttention-3, metadata made in every layer."""

    def attend_rows(self, sequences: Sequences, kv: PagedKV, pages: RaggedPages, factor: int) -> None:
        """Lists, metadata, attention: three kernels and what FA3 adds."""
        _, make_metadata, attend = fa3.library()
        write_table(pages, kv.page_size, factor, sequences.page_table, sequences.seq_lens)
        first_tokens = self.shared["first_tokens"][: pages.num_rows + 1]
        attend(sequences, first_tokens, make_metadata(sequences, first_tokens))


class FlashInferLayer(RowsLayer):
    """FlashInfer, planned once per batch size for rows of full width."""

    def attend_rows(self, sequences: Sequences, kv: PagedKV, pages: RaggedPages, factor: int) -> None:
        """Lists in the buffers of the plan, attention."""
        if kv.batch not in self.shared:
            self.shared[kv.batch] = self._plan(sequences, kv.page_size)
        buffers, decode = self.shared[kv.batch]
        compress(pages, kv.num_kv_heads, factor, *buffers)
        decode.wrapper.run(sequences.q, (sequences.k, sequences.v), out=sequences.out)

    @staticmethod
    def _plan(sequences: Sequences, page_size: int) -> tuple[tuple[torch.Tensor, ...], flashinfer_decode.Decode]:
        """Buffers (indptr, indices, last page lengths) and a plan over them; host work, so before any capture."""
        device = sequences.q.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"FlashInfer: {len(sequences.q)} rows were not planned before their graph was captured")
        rows, width = sequences.page_table.shape
        sizes = (rows + 1, rows * width, rows)
        buffers = tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
        decode = flashinfer_decode.Decode(sequences, buffers)
        indptr = torch.arange(rows + 1, dtype=torch.int32) * width
        decode.plan(indptr, buffers[1], torch.full((rows,), page_size, dtype=torch.int32))
        return buffers, decode


LAYERS = {"fa3": FA3Layer, "flashinfer": FlashInferLayer}
"""By the name that an arm of `bench e2e` gives."""
