"""Page summaries: per page, KV head and channel, the mean and the variance of the page's keys.

    mu_P = (1/S) sum_{k in P} k,        sigma_P^2 = (1/S) sum_{k in P} (k - mu_P)^2

(Section 3.1 of the paper.) The variance is the population variance, centred with the float32 mean before either is
rounded, so a large common offset neither cancels nor turns it negative. A summary is 2D values, 1/S of the page's
keys and values. It is written when the page's last slot is written and is read only for full pages, so page reuse,
prefix caching, chunked prefill and preemption need no bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moira_kernels.checks import require_tensor
from moira_kernels.layout import PagedKV


@dataclass(frozen=True)
class PageSummaries:
    """Summaries of every page of one layer's cache.

    Attributes:
        mean: [num_pages, H_kv, D] bf16 (float32 in exact tests), mu.
        variance: [num_pages, H_kv, D], same dtype, sigma squared.
    """

    mean: torch.Tensor
    variance: torch.Tensor

    def __post_init__(self) -> None:
        require_tensor("summaries.mean", self.mean, (None, None, None), (torch.bfloat16, torch.float32))
        require_tensor("summaries.variance", self.variance, tuple(self.mean.shape), self.mean.dtype, self.mean.device)
        if self.mean.stride() != self.variance.stride() or self.mean.stride(-1) != 1:
            raise ValueError(
                "summaries: expected mean and variance of equal strides with a contiguous last dimension, "
                f"got strides {self.mean.stride()} and {self.variance.stride()}"
            )

    @classmethod
    def allocate(cls, kv: PagedKV, dtype: torch.dtype = torch.bfloat16) -> PageSummaries:
        """Uninitialised summaries for every page of ``kv``: 4 * num_pages * H_kv * D bytes in bf16. The mean and the
        variance of a page and head lie side by side, as Estimate reads them.
        """
        shape = (kv.k.shape[0], kv.num_kv_heads, 2, kv.head_dim)
        return cls(*torch.empty(shape, dtype=dtype, device=kv.k.device).unbind(2))


def update_reference(summaries: PageSummaries, kv: PagedKV, page_ids: torch.Tensor) -> None:
    """Rebuild the summaries of the full pages ``page_ids`` [n] int (physical ids) from the cache, in float32."""
    keys = kv.k[page_ids].float()
    mean = keys.mean(dim=2)
    variance = (keys - mean[:, :, None]).square().mean(dim=2)
    summaries.mean[page_ids] = mean.to(summaries.mean.dtype)
    summaries.variance[page_ids] = variance.to(summaries.variance.dtype)


@triton.jit
def summarize_page(
    key_ptr,  # keys of one page and KV head
    mean_ptr,  # [D]
    variance_ptr,
    stride_token,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the summary of a full page. Two passes, so that the variance is centred with the float32 mean."""
    s = tl.arange(0, TILE_S)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, PAGE_SIZE, TILE_S):
        mask = (start + s < PAGE_SIZE)[:, None] & (d[None, :] < HEAD_DIM)
        keys = tl.load(key_ptr + (start + s)[:, None] * stride_token + d[None, :], mask=mask, other=0.0)
        total += tl.sum(keys.to(tl.float32), 0)
    mean = total / PAGE_SIZE
    squares = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, PAGE_SIZE, TILE_S):
        mask = (start + s < PAGE_SIZE)[:, None] & (d[None, :] < HEAD_DIM)
        keys = tl.load(key_ptr + (start + s)[:, None] * stride_token + d[None, :], mask=mask, other=0.0)
        centred = tl.where(mask, keys.to(tl.float32) - mean[None, :], 0.0)
        squares += tl.sum(centred * centred, 0)
    variance = squares / PAGE_SIZE
    tl.store(mean_ptr + d, mean.to(mean_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(variance_ptr + d, variance.to(variance_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def tile_tokens(page_size: int) -> int:
    """Tokens of a page taken at once: at least the 16 that the matrix units of Estimate need, few for the registers."""
    return min(32, max(16, triton.next_power_of_2(page_size)))


@triton.jit
def _update_kernel(
    page_ids_ptr,  # [n] int32
    key_ptr,
    mean_ptr,  # [num_pages, H_kv, D]
    variance_ptr,
    stride_page,
    stride_head,
    stride_token,
    stride_summary_page,
    stride_summary_head,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    page = tl.load(page_ids_ptr + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1)
    summary = page * stride_summary_page + head * stride_summary_head
    summarize_page(
        key_ptr + page * stride_page + head.to(tl.int64) * stride_head,
        mean_ptr + summary,
        variance_ptr + summary,
        stride_token,
        PAGE_SIZE,
        HEAD_DIM,
        TILE_S,
        BLOCK_D,
    )


def update(summaries: PageSummaries, kv: PagedKV, page_ids: torch.Tensor) -> None:
    """Rebuild the summaries of the full pages ``page_ids`` [n] int32 (physical ids) on the device, after a prefill.

    While decoding, Estimate writes the summary of a page that has just been filled.
    """
    require_tensor("page_ids", page_ids, (None,), torch.int32, kv.k.device)
    if page_ids.numel() == 0:
        return
    _update_kernel[(page_ids.numel(), kv.num_kv_heads)](
        page_ids,
        kv.k,
        summaries.mean,
        summaries.variance,
        *kv.k.stride()[:3],
        *summaries.mean.stride()[:2],
        PAGE_SIZE=kv.page_size,
        HEAD_DIM=kv.head_dim,
        TILE_S=tile_tokens(kv.page_size),
        BLOCK_D=triton.next_power_of_2(kv.head_dim),
        num_warps=4,
    )
