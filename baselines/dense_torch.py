"""Dense PyTorch: gather all pages of the batch, then scaled_dot_product_attention. Runs on any device.

PyTorch has no paged decode attention, so the gather through the block table is part of the time.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from baselines import Attention, all_pages
from moira_kernels.layout import RaggedPages

KIND = "attention"
NEEDS = ()


class DenseTorch(Attention):
    """One scaled_dot_product_attention call for the whole batch."""

    graph_safe = False
    extra_caches = 2.0  # the gathered keys and values, and again where a mask hides slots

    def plan(self) -> dict[str, float]:
        """Read the sequence lengths: a batch of equal, full rows needs no mask."""
        start = time.perf_counter()
        seq_lens = self.kv.seq_lens.tolist()
        copied = time.perf_counter()
        full = self.kv.max_pages * self.kv.page_size
        token = torch.arange(full, device=self.q.device)
        column = torch.arange(self.kv.max_pages, device=self.q.device)
        self.mask = None if min(seq_lens) == full else (token < self.kv.seq_lens[:, None])[:, None, None]
        self.table = torch.where(column < self.kv.num_pages()[:, None], self.kv.block_table, 0).long()
        done = time.perf_counter()
        return {"d2h_us": (copied - start) * 1e6, "index_build_us": (done - copied) * 1e6}

    def run(self) -> None:
        """Gather [B, H_kv, tokens, D], then attend. A padding row comes out as zeros."""
        # Heads first, so that the gathered pages of a head lie end to end and flatten copies nothing.
        keys, values = (x.transpose(0, 1)[:, self.table].transpose(0, 1).flatten(2, 3) for x in (self.kv.k, self.kv.v))
        q = self.q.unflatten(1, (self.kv.num_kv_heads, -1))
        if self.mask is not None:  # hidden slots may hold NaN, which no mask of the scores removes
            keys, values = (torch.where(self.mask.mT, x, 0) for x in (keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)
        if self.mask is not None:
            out = torch.where((self.kv.seq_lens > 0)[:, None, None, None], out, 0)
        self.out.copy_(out.flatten(1, 2))

    def attended(self) -> RaggedPages:
        """Every page."""
        return all_pages(self.kv)

    def moved_bytes(self) -> int:
        """The gather reads and writes every byte once, attention reads it again."""
        return 3 * super().moved_bytes()


ARM = DenseTorch
