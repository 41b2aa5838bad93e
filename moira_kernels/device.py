"""What the kernels need to know of the device, and which sizes they take."""

from __future__ import annotations

from functools import cache

import torch
import triton

from moira_kernels.checks import UnsupportedError
from moira_kernels.layout import PagedKV

MAX_GROUP = 16
MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 128
INTERPRETED = triton.knobs.runtime.interpret
"""True when kernels run in Triton's interpreter (TRITON_INTERPRET=1 at import), the only way to run them on a CPU."""


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; one in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def require_supported_sizes(device: torch.device, group: int, kv: PagedKV) -> None:
    """Raise ``UnsupportedError`` for a device, or for ``group`` query heads per list or a cache, outside the limits."""
    if device.type != "cuda" and not INTERPRETED:
        raise UnsupportedError(
            f"the kernels need tensors on a CUDA GPU, got {device}; on a CPU use the references, "
            "or set TRITON_INTERPRET=1 before the import to run the kernels in Triton's interpreter"
        )
    for name, value, limit in (
        ("query heads per list", group, MAX_GROUP),
        ("head dimension", kv.head_dim, MAX_HEAD_DIM),
        ("page size", kv.page_size, MAX_PAGE_SIZE),
    ):
        if value > limit:
            raise UnsupportedError(f"{name} {value} is not supported, the limit is {limit}")


@cache
def use_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch (sm_90 and newer): the next kernel's thread blocks start while the last ones of
    this kernel finish, and wait for its results.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
