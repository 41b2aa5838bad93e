"""The backend without a GPU: the same builder and steps, with PyTorch in place of FlashAttention and Triton.

For tests with vLLM's CPU build. vLLM's CPU platform takes its own backend whatever is chosen, so nothing but a test
that patches it can reach this.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from moira_kernels.pipeline import DecodeLayer, ReferenceLayer
from moira_kernels.vllm_plugin.backend import MoiraBackend, MoiraImpl, MoiraMetadataBuilder
from moira_kernels.vllm_plugin.steps import PAGE_SIZE


class CpuBackend(MoiraBackend):
    """MoiraBackend on a CPU, in float32 too."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [*MoiraBackend.supported_dtypes, torch.float32]

    @staticmethod
    def get_impl_cls() -> type[MoiraImpl]:
        """The implementation."""
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type[MoiraMetadataBuilder]:
        """The metadata builder."""
        return CpuMetadataBuilder


class CpuMetadataBuilder(MoiraMetadataBuilder):
    """The builder, with the float32 references as pipeline."""

    layer_class: ClassVar[type[DecodeLayer]] = ReferenceLayer


class CpuImpl(MoiraImpl):
    """What vLLM's native libraries do, in PyTorch: dense attention over the paged cache, and writing to it."""

    def dense(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales: Any) -> torch.Tensor:
        """Causal attention of every row in float32; a row of length 0 gives zeros."""
        if attn_metadata is None:
            return output.fill_(0)
        bounds = attn_metadata.query_start_loc.tolist()
        for row, (start, stop) in enumerate(pairwise(bounds)):
            length = int(attn_metadata.seq_lens[row])
            if length == 0:
                output[start:stop] = 0
                continue
            pages = attn_metadata.block_table[row, : -(-length // PAGE_SIZE)].long()
            kv = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].float()
            k, v = kv.split(self.head_size, dim=-1)
            position = torch.arange(length - (stop - start), length)
            visible = torch.arange(length) <= position[:, None]
            q = query[start:stop].transpose(0, 1).float()
            out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=True)
            output[start:stop] = out.transpose(0, 1)
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write each token's key and value [T, H_kv, D] to its slot; negative slots are skipped."""
        tokens = slot_mapping.shape[0]
        real = slot_mapping >= 0
        slots = slot_mapping[real]
        kv = torch.cat((key[:tokens][real], value[:tokens][real]), dim=-1)
        kv_cache[slots // PAGE_SIZE, :, slots % PAGE_SIZE] = kv.to(kv_cache.dtype)
