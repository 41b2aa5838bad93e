"""Dense FlashInfer tensor-core paged decode over the whole cache: one sequence per request, all KV heads.

The plan depends on sequence lengths only, so an engine makes it once a step for all layers; it is not timed.
"""

from __future__ import annotations

from baselines import Attention, all_pages, flashinfer_decode
from baselines.sequences import requests
from moira_kernels.layout import RaggedPages

KIND = "attention"
NEEDS = ("cuda", "flashinfer")


class DenseFlashInfer(Attention):
    """One call, B sequences."""

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.decode = flashinfer_decode.Decode(requests(q, self.out, kv))
        indptr, indices = flashinfer_decode.compressed(kv.block_table, kv.num_pages().cpu())
        self.decode.plan(indptr, indices, kv.last_page_len().cpu())
        self.implementation = f"{flashinfer_decode.name()}, plan not timed"

    def run(self) -> None:
        """Attend."""
        self.decode()

    def attended(self) -> RaggedPages:
        """Every page."""
        return all_pages(self.kv)


ARM = DenseFlashInfer
