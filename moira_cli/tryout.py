"""`moira bench e2e --engine transformers`: a small real model decoding on the CPU, to try the command anywhere.

The dense arm prefills a text and decodes greedily through PyTorch's attention. The sparse arm is fed the tokens that
the dense one chose, attends only to the pages that the coverage rule keeps, and is compared with it token by token. Its
time is that of the float32 references and says nothing about the kernels.
"""

from __future__ import annotations

import statistics
import time
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from moira_cli.recorder import CoverageAttention
from moira_kernels import attention
from moira_kernels.policies import Coverage

PAGE_SIZE = 64
ATTENTION_NAME = "moira_tryout"


class SparseAttention(CoverageAttention):
    """The coverage rule without the recorder's exact masses; counts the pages of decode steps."""

    def __init__(self, gamma: float):
        super().__init__(gamma, PAGE_SIZE)
        self.pages_read = self.pages_total = 0

    def decode(self, q, kv, scale):
        """One decode step of one layer: q [1, H_q, D] -> [1, H_q, D] float32."""
        selector = Coverage(gamma=self.gamma)
        selector.allocate(kv)
        selector.update(kv, torch.arange(int(kv.seq_lens[0]) // PAGE_SIZE))
        pages = selector.select(q, kv, scale)
        self.pages_read += int(pages.lengths.sum())
        self.pages_total += pages.lengths.numel() * kv.max_pages
        return attention.reference(q, kv, pages, scale)[0]


class TryOut:
    """Decodes ``tokens`` [context] int64 with both arms.

    Args:
        network: a transformers decoder on the CPU.
        tokens: the prompt.
        gamma: coverage of the sparse arm.
        steps: output tokens, the prompt's first one included.
        repetitions: how often they are decoded.
    """

    def __init__(self, network: Any, tokens: torch.Tensor, gamma: float, steps: int, repetitions: int):
        self.network, self.prompt, self.steps, self.repetitions = network, tokens[None], steps, repetitions
        self.sparse = SparseAttention(gamma)
        AttentionInterface.register(ATTENTION_NAME, self.sparse)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)

    @torch.inference_mode()
    def _decode(self, attention_name: str, forced: torch.Tensor | None) -> tuple[dict[str, Any], torch.Tensor]:
        """(times, logits [steps, vocabulary]) of greedy decoding, or of decoding ``forced`` [steps]."""
        self.network.set_attn_implementation(attention_name)
        cache = DynamicCache(config=self.network.config)

        def logits_of(tokens: torch.Tensor) -> torch.Tensor:
            return self.network(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()

        start = time.perf_counter()
        first = logits_of(self.prompt)
        ttft_ms = 1e3 * (time.perf_counter() - start)
        samples = []
        for _ in range(self.repetitions):
            cache.crop(self.prompt.shape[1] - cache.get_seq_length())
            logits = [first]
            start = time.perf_counter()
            for step in range(self.steps - 1):
                token = logits[-1].argmax() if forced is None else forced[step]
                logits.append(logits_of(token.view(1, 1)))
            samples.append(1e3 * (time.perf_counter() - start) / (self.steps - 1))
        median = statistics.median(samples)
        times = {
            "status": "ok",
            "tpot_method": "cpu_wall",
            "tpot_ms": {"median": median, "samples": samples},
            "ttft_ms": {"median": ttft_ms, "max": ttft_ms, "n": 1},
            "out_tok_s": 1e3 / median,
            "tokens_out": self.steps * self.repetitions,
            "page_read_fraction": 1.0,
            "flags": [],
        }
        return times, torch.stack(logits)

    @cached_property
    def _dense(self) -> tuple[dict[str, Any], torch.Tensor]:
        return self._decode("sdpa", None)

    def measure(self, arm: str) -> dict[str, Any]:
        """The measured part of a cell of ``dense-torch`` or ``sparse-torch``.

        Agreement is over the steps that read a cache: the share whose most likely token is the dense one, and the KL
        divergence of the sparse distribution from the dense one in nats.
        """
        times, dense = self._dense
        if arm == "dense-torch":
            return times
        read, total = self.sparse.pages_read, self.sparse.pages_total
        times, sparse = self._decode(ATTENTION_NAME, dense.argmax(-1))
        p, q = dense[1:].log_softmax(-1), sparse[1:].log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        times["page_read_fraction"] = (self.sparse.pages_read - read) / (self.sparse.pages_total - total)
        same = (dense[1:].argmax(-1) == sparse[1:].argmax(-1)).float().mean()
        times["agreement"] = {"same_token": float(same), "kl_mean": float(kl.mean()), "kl_max": float(kl.max())}
        return times
