"""Cases shared by tests and benchmarks: random caches with shuffled pages, poison, tolerances and byte counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moira_kernels.layout import PagedKV, RaggedPages

LAYOUTS = ("nhd", "hnd")


@dataclass(frozen=True)
class Geometry:
    """Attention heads of one model: H_q query heads, H_kv KV heads, head dimension D."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(self.num_q_heads, self.num_kv_heads, self.head_dim) < 1 or self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"geometry: expected H_q a multiple of H_kv and all positive, got {self}")

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    def __str__(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}/{self.head_dim}"


def empty_cache(
    num_pages: int, geometry: Geometry, page_size: int, layout: str, dtype: torch.dtype, device
) -> torch.Tensor:
    """An uninitialised fused cache [num_pages, H_kv, page_size, 2D] in vLLM's NHD or HND order."""
    heads, width = geometry.num_kv_heads, 2 * geometry.head_dim
    if layout == "hnd":
        return torch.empty((num_pages, heads, page_size, width), dtype=dtype, device=device)
    if layout == "nhd":
        return torch.empty((num_pages, page_size, heads, width), dtype=dtype, device=device).transpose(1, 2)
    raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")


def make_case(
    seq_lens: Sequence[int],
    geometry: Geometry,
    *,
    page_size: int = 64,
    layout: str = "nhd",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, PagedKV]:
    """Random queries [B, H_q, D] and a paged cache whose physical pages are in random order; values are N(0, 1).

    Physical page 0 belongs to nobody and spare block-table entries point to it.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    lens = torch.tensor(list(seq_lens), dtype=torch.int32)
    pages = (lens + page_size - 1) // page_size
    total, width = int(pages.sum()), max(1, int(pages.max()))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).to(torch.int32) + 1
    table = torch.zeros((len(lens), width), dtype=torch.int32)
    for b, ids in enumerate(order.split(pages.tolist())):
        table[b, : len(ids)] = ids
    cache = empty_cache(total + 1, geometry, page_size, layout, dtype, device)
    # In storage order, so that the fill is one contiguous pass and the same numbers for every stride.
    storage = cache if layout == "hnd" else cache.transpose(1, 2)
    storage.normal_(generator=generator)
    q = torch.empty((len(lens), geometry.num_q_heads, geometry.head_dim), dtype=dtype, device=device)
    q.normal_(generator=generator)
    return q, PagedKV.from_fused(cache, table.to(device), lens.to(device))


def poison(kv: PagedKV, pages: RaggedPages, value: float = float("nan")) -> None:
    """Overwrite in place every slot of the cache that these lists do not allow to be read, per KV head."""
    lists_per_kv_head = pages.num_lists // kv.num_kv_heads
    readable = torch.zeros(kv.k.shape[:3], dtype=torch.bool)
    for b in range(pages.batch):
        for h in range(pages.num_lists):
            n, last = int(pages.lengths[b, h]), int(pages.last_page_len[b, h])
            for position, page in enumerate(pages.page_ids[b, h, :n].tolist()):
                readable[page, h // lists_per_kv_head, : last if position == n - 1 else kv.page_size] = True
    hidden = ~readable[..., None].to(kv.k.device)
    kv.k.masked_fill_(hidden, value)
    kv.v.masked_fill_(hidden, value)


def tolerance(reference_fp32: torch.Tensor, reference_low: torch.Tensor) -> float:
    """Largest allowed |out - reference|: twice what PyTorch loses in the low precision, plus twice its eps times the
    largest value (the tolerance law of the FlashAttention tests).
    """
    loss = (reference_low.float() - reference_fp32).abs().max().item()
    eps = torch.finfo(reference_low.dtype).eps * max(reference_fp32.abs().max().item(), 1e-3)
    return 2 * loss + 2 * eps


def bf16_ulp(value: torch.Tensor) -> torch.Tensor:
    """Distance of neighbouring bf16 numbers at ``value`` (float32): 2^(floor(log2 |value|) - 7)."""
    exponent = torch.frexp(value.float().abs().clamp(min=1e-30)).exponent - 1
    return torch.ldexp(torch.ones_like(value, dtype=torch.float32), exponent - 7)


def max_abs_error(out: torch.Tensor, reference_fp32: torch.Tensor) -> float:
    """max |out - reference|; infinity where ``out`` is not finite, so that NaN never passes a comparison."""
    if not torch.isfinite(out).all():
        return float("inf")
    return (out.float() - reference_fp32).abs().max().item()


def assert_close(out: torch.Tensor, reference_fp32: torch.Tensor, reference_low: torch.Tensor) -> None:
    """Fail with the first position over the tolerance."""
    limit = tolerance(reference_fp32, reference_low)
    difference = (out.float() - reference_fp32).abs()
    bad = ~(difference <= limit)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} values are off by more than {limit:.3g}; first at {where}: "
            f"got {out[where].item()}, expected {reference_fp32[where].item()}"
        )


def useful_bytes(kv: PagedKV, pages: RaggedPages) -> int:
    """Bytes of the listed keys and values, counted from the lists as they are on the device."""
    tokens = int(pages.num_tokens(kv.page_size).sum(dtype=torch.int64))
    return tokens * 2 * kv.head_dim * kv.k.element_size()
