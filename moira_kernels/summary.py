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

    @classmethod
    def allocate(cls, kv: PagedKV, dtype: torch.dtype = torch.bfloat16) -> PageSummaries:
        """Uninitialised summaries for every page of ``kv``: 4 * num_pages * H_kv * D bytes in bf16."""
        shape = (kv.k.shape[0], kv.num_kv_heads, kv.head_dim)
        return cls(*(torch.empty(shape, dtype=dtype, device=kv.k.device) for _ in range(2)))


def update_reference(summaries: PageSummaries, kv: PagedKV, page_ids: torch.Tensor) -> None:
    """Rebuild the summaries of the full pages ``page_ids`` [n] int (physical ids) from the cache, in float32."""
    keys = kv.k[page_ids].float()
    mean = keys.mean(dim=2)
    variance = (keys - mean[:, :, None]).square().mean(dim=2)
    summaries.mean[page_ids] = mean.to(summaries.mean.dtype)
    summaries.variance[page_ids] = variance.to(summaries.variance.dtype)
