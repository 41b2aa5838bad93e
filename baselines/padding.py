"""Padding: every list extended to the longest one with pages that it left out, then one kernel of equal rows.

The paper's Table 6 baseline: a rectangular batch whose padding is read like real pages. FlashAttention-3 runs it where
there is one, else ``moira_kernels.attend``; the result names which.

The padding counts in the softmax, so the output is checked over the extended lists. Leaving it out exactly while still
reading it is not possible: FA3 masks by length only, and does not read what it masks. Padding with one page of zero
keys and values, whose weight is taken out through the LSE as out * exp(lse) / (exp(lse) - padding tokens), would read
that page from the L2 instead of memory, and fails where logits are low: simulated for 448 listed and 6,720 padding
tokens (D = 128), the largest error is 8e-4 at a mean logit of 0, as without padding, but 3e-3 at -8 and 0.25 at -16.

Extending the lists takes the longest length over all rows and is not timed, in this arm's favour.
"""

from __future__ import annotations

from baselines import Attention, fa3, page_sets, sequences
from moira_kernels import MoiraError
from moira_kernels.layout import RaggedPages

KIND = "attention"
NEEDS = ("cuda",)


def decode(rows: sequences.Sequences) -> fa3.Decode | sequences.Attend:
    """FA3 where it can run, else this project's kernel; the result's ``name`` says which, and why."""
    try:
        return fa3.Decode(rows)
    except MoiraError as error:
        return sequences.Attend(rows, because=str(error))


class Padding(Attention):
    """One call over rows as long as the longest list (or as their request)."""

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.padded = self._pad()
        self.rows = sequences.Rows(q, self.out, kv, self.padded)
        self.decode = decode(self.rows.sequences)
        self.implementation = self.decode.name

    def _pad(self) -> RaggedPages:
        longest = self.pages.lengths.amax().expand_as(self.pages.lengths)
        return page_sets.extended(self.pages, self.kv, longest)

    def plan(self) -> dict[str, float]:
        """Device work only: the extended lists."""
        page_sets.overwrite(self.padded, self._pad())
        self.rows.refresh()
        self.decode.schedule()
        return {}

    def run(self) -> None:
        """Attend."""
        self.decode()

    def attended(self) -> RaggedPages:
        """The lists with their padding."""
        return self.padded


ARM = Padding
