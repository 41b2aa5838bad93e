"""The vLLM backend: FlashAttention's, with decode rows through the sparse pipeline.

    steps of decode rows only   the pipeline on every row; vLLM captures these steps in full CUDA graphs
    prefill                     FlashAttention, and the summaries of the pages that the prompt has filled
    mixed steps                 both: FlashAttention on a copy of the metadata in which the decode rows have length 0,
                                then the pipeline on the decode rows

A captured step reads vLLM's persistent tensors and buffers taken before the first capture, never a value of the host. A
layer that the coverage rule does not cover stays FlashAttention's, by name; an engine with a feature that would make
summaries wrong, or decode rows longer than one token, is refused when its layers are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from moira_kernels.checks import UnsupportedError
from moira_kernels.device import MAX_GROUP, MAX_HEAD_DIM
from moira_kernels.pipeline import DecodeLayer
from moira_kernels.ranges import annotate
from moira_kernels.vllm_plugin import SUPPORTED_VLLM
from moira_kernels.vllm_plugin.config import MoiraConfig
from moira_kernels.vllm_plugin.steps import PAGE_SIZE, Group, filled_pages, leading_decode_rows

if not vllm.__version__.startswith(f"{SUPPORTED_VLLM}."):
    raise UnsupportedError(f"moira: supports vLLM {SUPPORTED_VLLM}, this is vLLM {vllm.__version__}")

logger = init_logger("vllm.moira")


def refuse(config: VllmConfig) -> None:
    """Raise ``UnsupportedError`` with the reason for an engine whose decoding cannot be sparse."""
    parallel = config.parallel_config
    reasons = {
        "speculative decoding (decode rows of several tokens)": config.speculative_config is not None,
        "KV connectors and offloading (pages that no step of this engine fills have no summary)": (
            config.kv_transfer_config is not None
        ),
        "decode context parallelism (a page does not hold consecutive tokens)": (
            parallel.decode_context_parallel_size > 1
        ),
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "micro-batches (dual-batch overlap)": parallel.use_ubatching,
        "a quantised KV cache": config.cache_config.cache_dtype not in MoiraBackend.supported_kv_cache_dtypes,
        "KV-sharing fast prefill": config.cache_config.kv_sharing_fast_prefill,
    }
    if found := [name for name, present in reasons.items() if present]:
        raise UnsupportedError(f"moira: the CUSTOM backend cannot serve {'; '.join(found)}")


class MoiraBackend(FlashAttentionBackend):
    """What ``--attention-backend CUSTOM`` stands for; the class methods tell vLLM what to refuse."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        """The name of the registry's member, which vLLM looks up."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MoiraImpl]:
        """The implementation."""
        return MoiraImpl

    @staticmethod
    def get_builder_cls() -> type[MoiraMetadataBuilder]:
        """The metadata builder."""
        return MoiraMetadataBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int]:
        """Pages of 64 tokens; a larger ``--block-size`` must be a multiple, which vLLM splits."""
        return [PAGE_SIZE]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 up to 256."""
        return head_size % 8 == 0 and head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper: FlashAttention 3 is what serves decode rows of length 0 without touching the others."""
        return capability.major == 9

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """No: pages would arrive without a summary."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: a row's list does not depend on its batch, but its output does within a rounding."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """No."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: rows are told apart by the host's query lengths."""
        return False


@dataclass
class MoiraMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata of one step, and what the pipeline needs.

    Attributes:
        group: the layers and their buffers.
        decode_rows: leading rows for the pipeline.
        filled: [n] int32 physical ids of the pages that prefill rows fill in this step; None if there is none.
        prefill: the metadata for FlashAttention's part; None if there is no prefill row.
    """

    group: Group | None = None
    decode_rows: int = 0
    filled: torch.Tensor | None = None
    prefill: FlashAttentionMetadata | None = None


class MoiraMetadataBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's builder, and which rows are whose. Owns the buffers of its layers.

    They are taken at the first step, when the caches are there. vLLM profiles graph memory on a small cache with
    builders that it throws away, so nothing outlives a builder.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False
    layer_class: ClassVar[type[DecodeLayer]] = DecodeLayer

    def __init__(self, kv_cache_spec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self.config = MoiraConfig.from_vllm(vllm_config)
        self.group: Group | None = None
        modules = vllm_config.compilation_config.static_forward_context
        ours = {name: module for name, module in modules.items() if isinstance(_impl(module), MoiraImpl)}
        why = {name: self._why_dense(name, module.impl) for name, module in ours.items()}
        if None not in why.values():
            raise UnsupportedError(f"moira: no layer of this model can be sparse: {why}")
        self.layers = {name: modules[name] for name in sorted(layer_names, key=layer_index)}
        self.dense_because = {name: why[name] for name in self.layers}
        dense = {name: reason for name, reason in self.dense_because.items() if reason is not None}
        logger.info("moira: %d layers sparse (%s)", len(self.layers) - len(dense), self.config)
        for name, reason in dense.items():
            logger.info("moira: %s stays dense: %s", name, reason)

    def _why_dense(self, name: str, impl: MoiraImpl) -> str | None:
        return "dense_layers" if layer_index(name) in self.config.dense_layers else impl.dense_because

    def _counts(self) -> dict[str, list[int]]:
        """Pages per KV head of this rank, by layer; empty under the coverage rule."""
        heads = self.num_heads_kv
        if self.config.count is not None:
            return {name: [self.config.count] * heads for name in self.layers}
        if self.config.counts is None:
            return {}
        rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        profile = {name: list(self.config.counts[layer_index(name)]) for name in self.layers}
        # With fewer KV heads than ranks, neighbouring ranks hold the same head.
        return {name: row[rank * len(row) // world :][:heads] for name, row in profile.items()}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """The metadata of one step. Host work over the host's lengths; nothing waits for the device."""
        common = common_attn_metadata
        if None not in self.dense_because.values():
            return super().build(common_prefix_len, common, fast_build)
        query_lens = common.query_start_loc_cpu.diff().numpy()[: common.num_reqs]
        decode_rows = leading_decode_rows(query_lens)
        all_decode = decode_rows == common.num_reqs
        # FlashAttention's schedule is for prefill rows and dense layers.
        no_schedule = all_decode and all(reason is None for reason in self.dense_because.values())
        dense = super().build(0, common, fast_build or no_schedule)
        if self.group is None:
            self.group = Group.allocate(
                {name: layer.kv_cache for name, layer in self.layers.items()},
                self.dense_because,
                self.num_heads_q,
                common.block_table_tensor,
                self.vllm_config.scheduler_config.max_num_seqs,
                self.config,
                self._counts(),
                self.layer_class,
            )
        metadata = MoiraMetadata(**vars(dense), group=self.group, decode_rows=decode_rows)
        if not all_decode:
            metadata.filled = self._filled(common, query_lens, decode_rows)
            metadata.prefill = dense
            if decode_rows:
                # All else, the schedule too, stays as it is: prefill rows come out as in a dense engine, bit for bit.
                dense.seq_lens = dense.seq_lens.clone()
                dense.seq_lens[:decode_rows] = 0
        return metadata

    def _filled(self, common: CommonAttentionMetadata, query_lens: np.ndarray, decode_rows: int) -> torch.Tensor | None:
        """Physical ids [n] int32 of the pages that the prefill rows fill in this step; None if there is none."""
        # Exact for prefill rows; only speculative decoding, which is refused, makes it a bound.
        seq_lens = common.seq_lens_cpu_upper_bound[: common.num_reqs].numpy()
        if late := [i for i in range(decode_rows, common.num_reqs) if query_lens[i] == 1 and seq_lens[i] > 1]:
            raise RuntimeError(f"moira: vLLM put decode rows {late} behind prefill rows; they would not be sparse")
        index = torch.from_numpy(filled_pages(query_lens, seq_lens, decode_rows))
        if not index.shape[1]:
            return None
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        return common.block_table_tensor[index[0], index[1]]

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """No: it is for prefixes shared by a whole batch, which the pipeline does not use."""
        return False


class MoiraImpl(FlashAttentionImpl):
    """One layer's attention.

    Attributes:
        dense_because: why the coverage rule does not cover the layer; None if it does.
    """

    supports_dcp = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config_or_none()
        if config is not None:
            refuse(config)
        reasons = {
            "not decoder self-attention": self.attn_type != AttentionType.DECODER,
            "sliding window": self.sliding_window != (-1, -1),
            "soft cap": self.logits_soft_cap != 0,
            "attention sinks": self.sinks is not None,
            "ALiBi": self.alibi_slopes is not None,
            "shares the cache of another layer": self.kv_sharing_target_layer_name is not None,
        }
        self.dense_because = next((reason for reason, present in reasons.items() if present), None)
        if self.dense_because is None:
            self._require_supported()

    def _require_supported(self) -> None:
        if self.num_queries_per_kv > MAX_GROUP:
            raise UnsupportedError(
                f"moira: {self.num_queries_per_kv} query heads per KV head are not supported, the limit is {MAX_GROUP}"
            )
        if current_platform.is_cuda() and self.vllm_flash_attn_version != 3:
            raise UnsupportedError(
                f"moira: prefill rows need FlashAttention 3, this engine has version {self.vllm_flash_attn_version}"
            )

    def dense(self, *args: Any) -> torch.Tensor:
        """FlashAttention's forward."""
        return super().forward(*args)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query and output are [T, H_q, D], the decode rows' tokens first; the keys are in the cache already."""
        inputs = (layer, query, key, value, kv_cache)
        group = getattr(attn_metadata, "group", None)
        if group is None:
            return self.dense(*inputs, attn_metadata, output, output_scale, output_block_scale)
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("moira: quantised attention output is not supported")
        step, name = attn_metadata, layer.layer_name
        if name not in group.layers:
            self.dense(*inputs, step, output)
        else:
            if step.filled is not None:
                group.prefill(name, kv_cache, step.block_table, step.seq_lens, step.filled)
            # Before the pipeline: it writes zeros for the decode rows.
            if step.prefill is not None:
                self.dense(*inputs, step.prefill, output)
            if rows := step.decode_rows:
                table, seq_lens = step.block_table, step.seq_lens
                with annotate(name):
                    group.decode(name, query[:rows], kv_cache, table, seq_lens, self.scale, output[:rows])
        if name == group.last and step.decode_rows:
            group.counters.count(step.seq_lens[: step.decode_rows], step.slot_mapping[: step.decode_rows])
        return output


def _impl(module: Any) -> Any:
    return getattr(module, "impl", None)


def layer_index(name: str) -> int:
    """The first integer in a layer's dotted name ("model.layers.3.self_attn.attn")."""
    return next(int(part) for part in name.split(".") if part.isdigit())
