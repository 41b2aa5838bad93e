"""One decode layer: Estimate, Select, Attend, Merge over buffers allocated once, so that a CUDA graph can hold it.

    layer = DecodeLayer.allocate(kv, num_heads=32)
    layer.prefill(kv, filled_pages)                # after a prompt: summaries of its full pages
    out = layer.run(q, kv, gamma=0.98)             # every decode step; capture this call

Estimate rebuilds the summary of a page when its last slot is written, so decoding needs nothing else. The layers of a
model run one after another, so they share every buffer but the summaries and the list lengths (``sibling``); a smaller
batch uses the first rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from moira_kernels import attention, estimate, merge, selection, slices, summary
from moira_kernels.attention import Workspace, attend
from moira_kernels.layout import PagedKV, RaggedPages
from moira_kernels.partition import eq4_blocks_per_row
from moira_kernels.ranges import annotate
from moira_kernels.summary import PageSummaries


@dataclass(frozen=True)
class DecodeLayer:
    """Buffers of one layer for batches of up to B requests.

    Attributes:
        summaries: of every page of the cache; belongs to the layer.
        log_mass: [B, H_q, max_pages] float32.
        pages: the lists of the last step, in the first rows; ``pages.lengths`` belongs to the layer.
        workspace: scratch of Attend.
        out: [B, H_q, D], where ``run`` writes unless told otherwise.
    """

    summaries: PageSummaries
    log_mass: torch.Tensor
    pages: RaggedPages
    workspace: Workspace
    out: torch.Tensor

    @classmethod
    def allocate(
        cls, kv: PagedKV, num_heads: int, *, batch: int | None = None, partition: str = "balanced"
    ) -> DecodeLayer:
        """Take the memory for caches of ``kv``'s sizes and H_q = ``num_heads``; ``nbytes`` says how much.

        ``batch`` is the largest batch, that of ``kv`` if None; ``partition`` is Attend's.
        """
        H, P, D, device = kv.num_kv_heads, kv.max_pages, kv.head_dim, kv.k.device
        B = kv.batch if batch is None else batch
        lists = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((B, H, P), (B, H), (B, H)))
        # Equation (4) can want rows - 1 more partials for a batch smaller than B: one more per row covers them.
        blocks = eq4_blocks_per_row(B * H) + 1 if partition == "eq4" else None
        return cls(
            PageSummaries.allocate(kv),
            torch.empty((B, num_heads, P), dtype=torch.float32, device=device),
            RaggedPages(*lists),
            Workspace.allocate(B, num_heads, H, D, device, partition, blocks),
            torch.empty((B, num_heads, D), dtype=kv.k.dtype, device=device),
        )

    def sibling(self, kv: PagedKV, lengths: torch.Tensor | None = None) -> DecodeLayer:
        """Another layer of the same sizes: own summaries and list lengths [B, H] int32, the other buffers shared."""
        lengths = torch.zeros_like(self.pages.lengths) if lengths is None else lengths
        return replace(self, summaries=PageSummaries.allocate(kv), pages=replace(self.pages, lengths=lengths))

    def _first_rows(self, batch: int) -> tuple[torch.Tensor, RaggedPages, Workspace]:
        """Log masses, lists and scratch for ``batch`` requests: views of the first rows."""
        lists = RaggedPages(*(t[:batch] for t in (self.pages.page_ids, self.pages.lengths, self.pages.last_page_len)))
        work, rows = self.workspace, lists.num_rows
        parts = {}
        if work.partition == "eq4":
            blocks = eq4_blocks_per_row(rows)
            shape = (rows, blocks, *work.partials.shape[2:])
            flat, flat_lse = work.partials.flatten(), work.partial_lse.flatten()
            parts = {
                "blocks": blocks,
                "partials": flat[: math.prod(shape)].view(shape),
                "partial_lse": flat_lse[: math.prod(shape[:3])].view(shape[:3]),
            }
        return self.log_mass[:batch], lists, replace(work, num_rows=rows, lse=work.lse[:batch], **parts)

    def compiled_for(self, batch: int) -> tuple:
        """What the kernels of a batch are compiled for: batches with equal values share them."""
        rows, blocks = batch * self.pages.num_lists, self.workspace.blocks
        _, num_heads, head_dim = self.out.shape
        if self.workspace.partition == "eq4":
            blocks = eq4_blocks_per_row(rows)
            return blocks, merge.launch_shape(blocks, num_heads // self.pages.num_lists, head_dim)
        at_once = slices.rows_at_once(rows)
        shape = merge.launch_shape(blocks // rows, num_heads // self.pages.num_lists, head_dim)
        return at_once, rows <= at_once, shape

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer."""
        tensors = (
            self.summaries.mean,
            self.summaries.variance,
            self.log_mass,
            self.pages.page_ids,
            self.pages.lengths,
            self.pages.last_page_len,
            self.workspace.partials,
            self.workspace.partial_lse,
            self.workspace.lse,
            self.out,
        )
        return sum(tensor.nbytes for tensor in tensors)

    def prefill(self, kv: PagedKV, page_ids: torch.Tensor) -> None:
        """Rebuild the summaries of the pages that a prefill chunk has filled; physical ids [n] int32."""
        summary.update(self.summaries, kv, page_ids)

    def run(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        *,
        gamma: float | None = None,
        counts: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One decode step: q [B, H_q, D] -> output [B, H_q, D], valid until the next step. Device work only.

        ``gamma`` chooses the coverage rule, ``counts`` [H_kv] int32 a fixed count per KV head. ``out`` [B, H_q, D] is
        written instead of the layer's own buffer if given.
        """
        log_mass, pages, workspace = self._first_rows(kv.batch)
        out = self.out[: kv.batch] if out is None else out
        with annotate("estimate"):
            estimate.launch(q, kv, self.summaries, log_mass, softmax_scale)
        with annotate("select"):
            selection.launch(log_mass, kv, pages, gamma=gamma, counts=counts, after_estimate=True)
        with annotate("attend"):
            return self.attend(q, kv, pages, workspace, softmax_scale, out)

    def attend(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        pages: RaggedPages,
        workspace: Workspace,
        softmax_scale: float | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Attention over the selected ``pages`` into ``out``: the last part of ``run``."""
        return attend(q, kv, pages, softmax_scale=softmax_scale, out=out, workspace=workspace)


class ReferenceLayer(DecodeLayer):
    """The same layer through the stages' float32 references, on any device; lengths are read on the host."""

    def prefill(self, kv: PagedKV, page_ids: torch.Tensor) -> None:
        """``DecodeLayer.prefill`` in PyTorch."""
        summary.update_reference(self.summaries, kv, page_ids.long())

    def run(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        *,
        gamma: float | None = None,
        counts: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``DecodeLayer.run`` in PyTorch."""
        out = self.out[: kv.batch] if out is None else out
        current = kv.block_table.gather(1, (kv.num_pages() - 1).clamp(min=0)[:, None].long())[:, 0]
        self.prefill(kv, current[kv.last_page_len() == kv.page_size])
        shares = selection.group_shares(estimate.reference(q, kv, self.summaries, softmax_scale), kv.num_kv_heads)
        if counts is None:
            keep = selection.coverage_bisection(shares, kv.num_pages(), gamma)
        else:
            keep = selection.largest(shares, kv.num_pages(), counts.expand(shares.shape[:2]))
        pages = selection.compact(keep, kv)
        for name in ("page_ids", "lengths", "last_page_len"):
            getattr(self.pages, name)[: kv.batch].copy_(getattr(pages, name))
        return out.copy_(attention.reference(q, kv, pages, softmax_scale)[0])
