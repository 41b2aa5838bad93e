"""PyTorch over the page lists: gather each row's pages, then scaled_dot_product_attention. Runs on any device.

PyTorch needs every row's length on the host, so the lists are copied there and turned into token indices in ``plan``.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from baselines import Attention

KIND = "attention"
NEEDS = ()


class SparseTorch(Attention):
    """One scaled_dot_product_attention call per row, on exactly the listed tokens."""

    graph_safe = False

    def plan(self) -> dict[str, float]:
        """Copy the lists to the host; per row, the index of every listed token in the flattened cache."""
        start = time.perf_counter()
        lengths = self.pages.lengths.tolist()
        tokens = self.pages.num_tokens(self.kv.page_size).tolist()
        copied = time.perf_counter()
        S, H = self.kv.page_size, self.pages.num_lists
        slot = torch.arange(S, device=self.q.device)
        self.rows = []
        for b in range(self.pages.batch):
            for h in range(H):
                ids = self.pages.page_ids[b, h, : lengths[b][h]].long()
                self.rows.append((b, h, (ids[:, None] * S + slot).flatten()[: tokens[b][h]]))
        done = time.perf_counter()
        return {"d2h_us": (copied - start) * 1e6, "index_build_us": (done - copied) * 1e6}

    def run(self) -> None:
        """Row by row: gather, attend, write."""
        group = self.q.shape[1] // self.pages.num_lists
        lists_per_kv_head = self.pages.num_lists // self.kv.num_kv_heads
        for b, h, index in self.rows:
            heads = slice(h * group, (h + 1) * group)
            if not index.numel():
                self.out[b, heads] = 0
                continue
            page, slot = index // self.kv.page_size, index % self.kv.page_size
            keys = self.kv.k[page, h // lists_per_kv_head, slot]
            values = self.kv.v[page, h // lists_per_kv_head, slot]
            # The group's query heads share these keys, so they stand as G query positions of one head.
            self.out[b, heads] = F.scaled_dot_product_attention(self.q[b, heads][None], keys[None], values[None])[0]

    def moved_bytes(self) -> int:
        """The gather reads and writes every byte once, attention reads it again."""
        return 3 * super().moved_bytes()


ARM = SparseTorch
