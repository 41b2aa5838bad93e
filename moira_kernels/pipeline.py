"""One decode layer: Estimate, Select, Attend, Merge over buffers allocated once, so that a CUDA graph can hold it.

    layer = DecodeLayer.allocate(kv, num_heads=32)
    layer.prefill(kv, filled_pages)                # after a prompt: summaries of its full pages
    out = layer.run(q, kv, gamma=0.98)             # every decode step; capture this call

Estimate rebuilds the summary of a page when its last slot is written, so decoding needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moira_kernels import estimate, selection, summary
from moira_kernels.attention import Workspace, attend
from moira_kernels.layout import PagedKV, RaggedPages
from moira_kernels.ranges import annotate
from moira_kernels.summary import PageSummaries


@dataclass(frozen=True)
class DecodeLayer:
    """Buffers of one layer for a batch shape.

    Attributes:
        summaries: of every page of the cache; belongs to the layer.
        log_mass: [B, H_q, max_pages] float32.
        pages: the lists of the last step.
        workspace: scratch of Attend.
        out: [B, H_q, D].
    """

    summaries: PageSummaries
    log_mass: torch.Tensor
    pages: RaggedPages
    workspace: Workspace
    out: torch.Tensor

    @classmethod
    def allocate(cls, kv: PagedKV, num_heads: int) -> DecodeLayer:
        """Take the memory for caches of ``kv``'s sizes and H_q = ``num_heads``; ``nbytes`` says how much."""
        B, H, P, device = kv.batch, kv.num_kv_heads, kv.max_pages, kv.k.device
        lists = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((B, H, P), (B, H), (B, H)))
        return cls(
            PageSummaries.allocate(kv),
            torch.empty((B, num_heads, P), dtype=torch.float32, device=device),
            RaggedPages(*lists),
            Workspace.allocate(B, num_heads, H, kv.head_dim, device),
            torch.empty((B, num_heads, kv.head_dim), dtype=kv.k.dtype, device=device),
        )

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
    ) -> torch.Tensor:
        """One decode step: q [B, H_q, D] -> output [B, H_q, D], valid until the next step. Device work only.

        ``gamma`` chooses the coverage rule, ``counts`` [H_kv] int32 a fixed count per KV head.
        """
        with annotate("estimate"):
            estimate.launch(q, kv, self.summaries, self.log_mass, softmax_scale)
        with annotate("select"):
            selection.launch(self.log_mass, kv, self.pages, gamma=gamma, counts=counts)
        with annotate("attend"):
            return attend(q, kv, self.pages, softmax_scale=softmax_scale, out=self.out, workspace=self.workspace)
