"""Dense FlashAttention-3 over the whole cache, the decode call of vLLM: one sequence per request, all KV heads.

Scheduler metadata depends on sequence lengths only, so vLLM makes it once a step for all layers; it is not timed.
"""

from __future__ import annotations

from baselines import Attention, all_pages
from baselines.fa3 import Decode
from baselines.sequences import requests
from moira_kernels.layout import RaggedPages

KIND = "attention"
NEEDS = ("cuda", "vllm|flash_attn_3")


class DenseFA3(Attention):
    """One FA3 call, B sequences."""

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.decode = Decode(requests(q, self.out, kv))
        self.implementation = f"{self.decode.name}, metadata not timed"

    def run(self) -> None:
        """Attend."""
        self.decode()

    def attended(self) -> RaggedPages:
        """Every page."""
        return all_pages(self.kv)


ARM = DenseFA3
