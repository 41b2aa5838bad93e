"""Power-of-two buckets: rows grouped by length rounded up to a power of two, one kernel call per bucket.

The paper's Table 6 baseline. Within a bucket lists are padded to the bucket's length as in ``padding``, with pages that
they left out, and checked so. Which rows are in which bucket is host work: lengths are copied to the host, rows are
sorted and the tables of each bucket gathered, whenever the lists change. ``run`` also sorts the queries and unsorts the
outputs. FlashAttention-3 where there is one (metadata ready, not timed), else ``moira_kernels.attend``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby

import torch

from baselines import Attention, page_sets
from baselines.padding import decode
from baselines.sequences import Rows
from moira_kernels.layout import RaggedPages

KIND = "attention"
NEEDS = ("cuda",)


def bucket_of(length: int) -> int:
    """``length`` rounded up to a power of two; 0 for an empty row."""
    return 1 << (length - 1).bit_length() if length else 0


class Pow2Buckets(Attention):
    """One call per occupied bucket, over sorted rows."""

    graph_safe = False

    def plan(self) -> dict[str, float]:
        """Sort rows into buckets on the host and lay the padded lists out bucket by bucket."""
        start = time.perf_counter()
        lengths = self.pages.lengths.flatten().tolist()
        copied = time.perf_counter()
        buckets = [bucket_of(length) for length in lengths]
        order = sorted(range(len(buckets)), key=buckets.__getitem__)
        self.order = torch.tensor(order, device=self.q.device)
        self.place = self.order.argsort()
        grouped = time.perf_counter()

        # The padded lists themselves are not timed, as in `padding`.
        targets = torch.tensor(buckets, dtype=torch.int32, device=self.q.device).view_as(self.pages.lengths)
        self.padded = page_sets.extended(self.pages, self.kv, targets)
        rows = Rows(self.q, self.out, self.kv, self.padded).sequences
        self.rows = rows

        gathering = time.perf_counter()
        self.sorted = replace(
            rows,
            q=torch.empty_like(rows.q),
            out=torch.zeros_like(rows.q),  # empty rows are in no call
            page_table=rows.page_table[self.order],
            seq_lens=rows.seq_lens[self.order],
        )
        gathered = time.perf_counter()

        self.calls, first = [], 0
        for width, members in groupby(sorted(buckets)):
            count = len(list(members))
            if width:
                self.calls.append(decode(self.sorted.narrow(first, count, width)))
            first += count
        self.implementation = self.calls[0].name if self.calls else None
        return {
            "d2h_us": (copied - start) * 1e6,
            "index_build_us": (grouped - copied + gathered - gathering) * 1e6,
        }

    def run(self) -> None:
        """Sort the queries, one call per bucket, unsort the outputs."""
        torch.index_select(self.rows.q, 0, self.order, out=self.sorted.q)
        for call in self.calls:
            call()
        torch.index_select(self.sorted.out, 0, self.place, out=self.rows.out)

    def attended(self) -> RaggedPages:
        """The lists with their padding."""
        return self.padded


ARM = Pow2Buckets
