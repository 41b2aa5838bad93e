"""Argument checks that read tensor metadata only (never values, so never a device synchronisation).

    MoiraError
    ├── UnsupportedError          the request is well formed, but this device, size or version cannot serve it
    └── MissingDependencyError    a library is not installed; the message carries the install line

Wrong arguments raise ``ValueError`` with the name, what was expected and what came.
"""

from __future__ import annotations

import torch


class MoiraError(Exception):
    """Base of the errors that this package raises on purpose."""


class UnsupportedError(MoiraError):
    """A GPU, head size, page size, version or feature outside the supported limits; the message names the limit."""


class MissingDependencyError(MoiraError):
    """An optional library is missing; the message names the install command."""


def describe(tensor: torch.Tensor) -> str:
    """'int32 [4, 8]' for an int32 tensor of shape (4, 8)."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def require_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Raise ``ValueError`` unless ``tensor`` has this shape (None = any size), dtype (or one of them) and device.

    >>> require_tensor("pages.lengths", lengths, (4, 8), torch.int32)
    ValueError: pages.lengths: expected int32 [4, 8], got int64 [4, 32]
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    shape_ok = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype not in dtypes or not shape_ok:
        wanted_dtype = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        wanted_shape = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected {wanted_dtype} [{wanted_shape}], got {describe(tensor)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")


def require_divisible(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise ``ValueError`` unless ``value`` is a positive multiple of ``divisor``."""
    if divisor <= 0 or value <= 0 or value % divisor:
        raise ValueError(f"{name}: expected a positive multiple of {divisor_name} = {divisor}, got {value}")
