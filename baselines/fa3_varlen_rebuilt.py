"""FlashAttention-3, every row a sequence of its own length; scheduler metadata made in every call, as in a graph.

It is one small kernel that reads the lengths on the device: what ``fa3-varlen`` leaves out when lists change by layer.
"""

from __future__ import annotations

from baselines.fa3_varlen import FA3Varlen

KIND = "attention"
NEEDS = ("cuda", "vllm|flash_attn_3")


class FA3VarlenRebuilt(FA3Varlen):
    """``fa3-varlen`` with the metadata inside ``run``."""

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.implementation = self.decode.name

    def plan(self) -> dict[str, float]:
        """Device work only: ids and lengths for the lists as they are."""
        self.rows.refresh()
        return {}

    def run(self) -> None:
        """Metadata, then attend."""
        self.decode.scheduled()


ARM = FA3VarlenRebuilt
