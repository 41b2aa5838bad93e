"""FlashInfer's paged decode for the arms that call it: the tensor-core kernel, planned on the host.

``plan`` cuts every row into chunks of one size, chosen by bisection so that they fill the GPU, and uploads which thread
block takes which chunk of which row. ``run`` reads lengths and page ids from device memory: rows shorter than planned
lose their last chunks, and the merge ignores them.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any

import torch

from baselines.sequences import Sequences
from moira_kernels import UnsupportedError

WORKSPACE_BYTES = 256 * 1024**2
"""FlashInfer recommends half of it; a plan for graphs of 4,096 rows of D = 128 takes 168 MB."""
HEAD_DIMS = (64, 128, 256)


def name() -> str:
    """Library and version."""
    return f"flashinfer {importlib.metadata.version('flashinfer-python')}"


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """Scratch shared by all wrappers of a device, whose kernels follow one another."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class Decode:
    """BatchDecodeWithPagedKVCacheWrapper over ``sequences``.

    Args:
        sequences: what to attend; ``page_table`` and ``seq_lens`` are not used, lists come with ``plan``.
        graph_buffers: (indptr [N + 1], indices, last_page_len [N]) int32 on the device for one plan whose lists are
            rewritten there; None for a plan per change of lists.

    Raises:
        UnsupportedError: a dtype or head dimension that the kernel does not know.
    """

    def __init__(
        self, sequences: Sequences, graph_buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    ):
        head_dim = sequences.q.shape[2]
        if sequences.q.dtype not in (torch.bfloat16, torch.float16) or head_dim not in HEAD_DIMS:
            raise UnsupportedError(
                f"FlashInfer decode needs bf16 or fp16 and a head dimension of {', '.join(map(str, HEAD_DIMS))}, "
                f"got {sequences.q.dtype} and {head_dim}"
            )
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        buffers: dict[str, Any] = {}
        if graph_buffers is not None:
            names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
            buffers = {"use_cuda_graph": True, **dict(zip(names, graph_buffers, strict=True))}
        self.sequences = sequences
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace(sequences.q.device), "NHD", use_tensor_cores=True, **buffers
        )

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
        """Plan for rows end to end: indptr [N + 1] and last_page_len [N] on the host, indices on the device."""
        s = self.sequences
        self.wrapper.plan(
            indptr,
            indices,
            last_page_len,
            s.q.shape[1],
            s.k.shape[2],
            s.q.shape[2],
            s.page_size,
            q_data_type=s.q.dtype,
            kv_data_type=s.k.dtype,
        )

    def __call__(self) -> None:
        """Write ``sequences.out``."""
        s = self.sequences
        self.wrapper.run(s.q, (s.k, s.v), out=s.out)


def compressed(page_table: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr [N + 1] int32 on the host, indices int32 on the table's device) of rows of ``lengths`` [N] pages.

    ``lengths`` is on the host; the indices are gathered on the device without waiting for it.
    """
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=indptr[1:])
    total = int(indptr[-1])
    device = page_table.device
    begin, count = indptr[:-1].to(device, non_blocking=True), lengths.to(device, non_blocking=True)
    row = torch.repeat_interleave(count, output_size=total)
    return indptr, page_table[row, torch.arange(total, device=device) - begin[row]]
