"""FlashAttention-3 for the arms that call it: vLLM's own build, or the wheel tokenspeed-fa3 where vLLM is absent.

A GPU kernel of FA3 reads the lengths in device memory and decides how many splits each sequence gets; its result is the
scheduler metadata. ``Decode.schedule`` launches it, ``Decode()`` attends with what it left. Metadata older than the
lengths costs balance, not correctness: a thread block cuts the present length into the number of splits it finds.

Arguments are those of vLLM's decode step under full CUDA graphs. With 16-byte aligned tokens and a group of up to 64
query heads FA3 copies pages token by token (cp.async) through 64-bit strides, so pages may lie inside one another.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache

import torch

from baselines.sequences import Sequences
from moira_kernels import MissingDependencyError, UnsupportedError

MAX_SPLITS = 32
"""vLLM's bound on the splits of a sequence under full CUDA graphs (flash_attn_max_num_splits_for_cuda_graph)."""


@cache
def library() -> tuple[str, Callable[..., torch.Tensor], Callable[..., object]]:
    """(name and version, metadata function, attention function), both with the arguments that ``Decode`` gives.

    Raises:
        MissingDependencyError: neither library is there, or neither loads; says why.
    """
    reasons = []
    if importlib.util.find_spec("vllm") is not None:
        try:
            from vllm.vllm_flash_attn import flash_attn_interface as vllm_fa
        except ImportError as error:
            reasons.append(f"vllm: {error}")
        else:
            if vllm_fa.FA3_AVAILABLE:
                return f"FA3 of vllm {importlib.metadata.version('vllm')}", _vllm_metadata, _vllm_attend
            reasons.append(f"vllm: {vllm_fa.FA3_UNAVAILABLE_REASON}")
    if importlib.util.find_spec("flash_attn_3") is not None:
        try:
            importlib.import_module("flash_attn_3._C")  # registers torch.ops.flash_attn_3
        except ImportError as error:
            reasons.append(f"flash_attn_3: {error}")
        else:
            return f"FA3 of {_wheel()}", _wheel_metadata, _wheel_attend
    why = "; ".join(reasons) or "neither vllm nor flash_attn_3 is installed"
    raise MissingDependencyError(f"no FlashAttention-3 ({why}): pip install 'moira-attention[fa3]'")


def require(sequences: Sequences) -> str:
    """The library's name and version. Raises ``UnsupportedError`` or ``MissingDependencyError`` if FA3 cannot run."""
    device, dtype, head_dim = sequences.q.device, sequences.q.dtype, sequences.q.shape[2]
    if device.type != "cuda":
        raise UnsupportedError(f"FA3 needs a Hopper GPU (sm_90), this is the {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise UnsupportedError(f"FA3 needs a Hopper GPU (sm_90), this is sm_{major}{minor}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"FA3 needs bf16 or fp16, got {dtype}")
    if head_dim % 8 or head_dim > 256:
        raise UnsupportedError(f"FA3 needs a head dimension that is a multiple of 8 up to 256, got {head_dim}")
    return library()[0]


class Decode:
    """FA3 over sequences of one query token."""

    def __init__(self, sequences: Sequences):
        self.name = require(sequences)
        _, self.make_metadata, self.attend = library()
        self.sequences = sequences
        self.first_tokens = torch.arange(len(sequences.q) + 1, dtype=torch.int32, device=sequences.q.device)
        self.metadata = self.make_metadata(sequences, self.first_tokens)

    def schedule(self) -> None:
        """Scheduler metadata for the lengths as they are, in place: one kernel on the device, and a copy."""
        self.metadata.copy_(self.make_metadata(self.sequences, self.first_tokens))

    def __call__(self) -> None:
        """Write ``sequences.out``."""
        self.attend(self.sequences, self.first_tokens, self.metadata)

    def scheduled(self) -> None:
        """The same with metadata made first."""
        self.attend(self.sequences, self.first_tokens, self.make_metadata(self.sequences, self.first_tokens))


def _vllm_metadata(s: Sequences, first_tokens: torch.Tensor) -> torch.Tensor:
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    return get_scheduler_metadata(
        batch_size=len(s.q),
        max_seqlen_q=1,
        max_seqlen_k=s.max_tokens,
        num_heads_q=s.q.shape[1],
        num_heads_kv=s.k.shape[2],
        headdim=s.q.shape[2],
        cache_seqlens=s.seq_lens,
        qkv_dtype=s.q.dtype,
        cu_seqlens_q=first_tokens,
        page_size=s.page_size,
        causal=True,
        num_splits=MAX_SPLITS,
    )


def _vllm_attend(s: Sequences, first_tokens: torch.Tensor, metadata: torch.Tensor) -> None:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    flash_attn_varlen_func(
        s.q,
        s.k,
        s.v,
        max_seqlen_q=1,
        cu_seqlens_q=first_tokens,
        max_seqlen_k=s.max_tokens,
        seqused_k=s.seq_lens,
        causal=True,
        block_table=s.page_table,
        out=s.out,
        scheduler_metadata=metadata,
        num_splits=MAX_SPLITS,
        fa_version=3,
    )


def _wheel() -> str:
    try:
        return f"tokenspeed-fa3 {importlib.metadata.version('tokenspeed-fa3')}"
    except importlib.metadata.PackageNotFoundError:
        return "flash_attn_3"


# The wheel's Python functions take no `out`, which would add a copy to the arm's time: its operators do.
def _wheel_metadata(s: Sequences, first_tokens: torch.Tensor) -> torch.Tensor:
    return torch.ops.flash_attn_3.get_scheduler_metadata(
        batch_size=len(s.q),
        max_seqlen_q=1,
        max_seqlen_k=s.max_tokens,
        num_heads=s.q.shape[1],
        num_heads_k=s.k.shape[2],
        headdim=s.q.shape[2],
        headdim_v=s.q.shape[2],
        qkv_dtype=s.q.dtype,
        seqused_k=s.seq_lens,
        cu_seqlens_q=first_tokens,
        page_size=s.page_size,
        is_causal=True,
        num_splits=MAX_SPLITS,
    )


def _wheel_attend(s: Sequences, first_tokens: torch.Tensor, metadata: torch.Tensor) -> None:
    torch.ops.flash_attn_3.fwd(
        s.q,
        s.k,
        s.v,
        out=s.out,
        cu_seqlens_q=first_tokens,
        seqused_k=s.seq_lens,
        max_seqlen_q=1,
        max_seqlen_k=s.max_tokens,
        page_table=s.page_table,
        softmax_scale=s.q.shape[2] ** -0.5,
        is_causal=True,
        scheduler_metadata=metadata,
        num_splits=MAX_SPLITS,
    )
