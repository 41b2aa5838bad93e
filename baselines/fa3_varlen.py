"""FlashAttention-3, every row a sequence of its own length; its scheduler metadata is ready and not timed.

The metadata belongs to the row lengths, so with lists that change in every layer it has to be made in every layer:
``fa3-varlen-rebuilt`` pays for that in its kernel time. Here ``plan`` makes it, on the device and outside the clock.
"""

from __future__ import annotations

from baselines import Attention
from baselines.fa3 import Decode
from baselines.sequences import Rows

KIND = "attention"
NEEDS = ("cuda", "vllm|flash_attn_3")


class FA3Varlen(Attention):
    """One FA3 call, B * H sequences."""

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.rows = Rows(q, self.out, kv, pages)
        self.decode = Decode(self.rows.sequences)
        self.implementation = f"{self.decode.name}, metadata not timed"

    def plan(self) -> dict[str, float]:
        """Device work only: ids, lengths and metadata for the lists as they are."""
        self.rows.refresh()
        self.decode.schedule()
        return {}

    def run(self) -> None:
        """Attend."""
        self.decode()


ARM = FA3Varlen
