"""Runs a real decoder with the coverage rule in place of its attention and notes every page list.

Through transformers' attention interface, so any model that uses it works. Prompts are prefilled densely; then the
text's own next tokens are fed one by one (teacher-forced), each step attending only to the pages that the rule keeps
in every layer. What such a step adds to the KV cache is computed from sparse attention, as in serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from moira_kernels import attention, estimate, selection
from moira_kernels.checks import UnsupportedError
from moira_kernels.layout import PagedKV
from moira_kernels.policies import Coverage

ATTENTION_NAME = "moira_coverage"


def contiguous_cache_as_pages(key: torch.Tensor, value: torch.Tensor, page_size: int) -> PagedKV:
    """View one request's keys and values [H_kv, tokens, D] as a paged cache, padded to whole pages."""
    tokens = key.shape[1]
    pages = -(-tokens // page_size)
    padded = [F.pad(x, (0, 0, 0, pages * page_size - tokens)) for x in (key, value)]
    k, v = (x.unflatten(1, (pages, page_size)).transpose(0, 1) for x in padded)
    device = key.device
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    return PagedKV(k, v, table, torch.tensor([tokens], dtype=torch.int32, device=device))


@dataclass
class StepRecord:
    """What one decode step chose: per layer, [H_kv, pages] masks, [H_kv] figures and [H_kv, G, pages] log masses."""

    log_mass: list[np.ndarray] = field(default_factory=list)
    keep: list[np.ndarray] = field(default_factory=list)
    oracle_counts: list[np.ndarray] = field(default_factory=list)
    covered: list[np.ndarray] = field(default_factory=list)


class CoverageAttention:
    """The attention function given to transformers: dense for prompts, the coverage rule for single decode tokens."""

    def __init__(self, gamma: float, page_size: int):
        self.gamma, self.page_size = gamma, page_size
        self.step = StepRecord()

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        """query [1, H_q, T, D], key and value [1, H_kv, tokens, D] -> [1, T, H_q, D]."""
        for feature in ("sliding_window", "softcap", "s_aux", "position_bias"):
            if kwargs.get(feature) is not None:
                raise UnsupportedError(f"layer {module.layer_idx}: {feature} attention is not covered by the rule")
        if query.shape[2] > 1:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        kv = contiguous_cache_as_pages(key[0], value[0], self.page_size)
        out = self.decode(query[:, :, 0], kv, scaling)
        return out[:, None].to(query.dtype), None

    def decode(self, q: torch.Tensor, kv: PagedKV, scale: float | None) -> torch.Tensor:
        """One decode step of one layer: update, estimate, select, attend; q [1, H_q, D] -> [1, H_q, D] float32."""
        selector = Coverage(gamma=self.gamma)
        selector.allocate(kv)
        selector.update(kv, torch.arange(int(kv.seq_lens[0]) // kv.page_size, device=q.device))
        log_mass = selector.log_mass(q, kv, scale)
        keep = selector.keep(selection.group_shares(log_mass, kv.num_kv_heads), kv)
        exact = selection.group_shares(estimate.exact_reference(q, kv, scale), kv.num_kv_heads)
        oracle = selection.coverage_sorted(exact, kv.num_pages(), self.gamma)
        self.step.log_mass.append(log_mass[0].unflatten(0, (kv.num_kv_heads, -1)).cpu().numpy())
        self.step.keep.append(keep[0].cpu().numpy())
        self.step.oracle_counts.append(oracle[0].sum(-1).cpu().numpy())
        self.step.covered.append((exact * keep)[0].sum(-1).cpu().numpy())
        return attention.reference(q, kv, selection.compact(keep, kv), scale)[0]


class Recorder:
    """Decodes documents with a model whose attention is the coverage rule."""

    def __init__(self, model: Any, gamma: float, page_size: int):
        self.model = model
        self.attention = CoverageAttention(gamma, page_size)
        AttentionInterface.register(ATTENTION_NAME, self.attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, steps: int) -> Iterator[StepRecord]:
        """Prefill all but the last ``steps`` of ``tokens`` [n], then yield the record of each of those steps."""
        cache = DynamicCache(config=self.model.config)
        prompt, rest = tokens[None, :-steps], tokens[-steps:]
        self.model(prompt, cache=cache, use_cache=True, logits_to_keep=1)
        for token in rest:
            self.attention.step = StepRecord()
            self.model(token[None, None], cache=cache, use_cache=True, logits_to_keep=1)
            yield self.attention.step
