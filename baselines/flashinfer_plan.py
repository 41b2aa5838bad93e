"""FlashInfer tensor-core paged decode, every row a sequence; planned on the host whenever the lists change.

The lengths are copied to the host, the index arrays built and ``plan()`` called, each timed on its own; the kernel is
what the plan was made for. With lists that change in every layer this stands outside any CUDA graph.
"""

from __future__ import annotations

import time

import torch

from baselines import Attention, flashinfer_decode
from baselines.sequences import Rows

KIND = "attention"
NEEDS = ("cuda", "flashinfer")


class FlashInferPlan(Attention):
    """One call, B * H sequences."""

    graph_safe = False

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.rows = Rows(q, self.out, kv, pages)
        self.decode = flashinfer_decode.Decode(self.rows.sequences)
        self.implementation = flashinfer_decode.name()

    def plan(self) -> dict[str, float]:
        """Copy the lengths to the host, build the index arrays, let the library plan."""
        self.rows.refresh()
        if self.q.is_cuda:
            torch.cuda.synchronize()  # the copy to the host must not wait for what is not timed
        start = time.perf_counter()
        lengths = self.pages.lengths.flatten().cpu()
        last_page_len = self.pages.last_page_len.flatten().cpu()
        copied = time.perf_counter()
        indptr, indices = flashinfer_decode.compressed(self.rows.sequences.page_table, lengths)
        built = time.perf_counter()
        self.decode.plan(indptr, indices, last_page_len)
        planned = time.perf_counter()
        return {
            "d2h_us": (copied - start) * 1e6,
            "index_build_us": (built - copied) * 1e6,
            "plan_call_us": (planned - built) * 1e6,
        }

    def run(self) -> None:
        """Attend."""
        self.decode()


ARM = FlashInferPlan
