"""The two inputs that every attention here takes: a paged KV cache and one page list per row.

A row is one (request, list head). With B requests and H list heads there are B * H rows. H is the number of KV
heads when a group of query heads shares a list (Moira), or the number of query heads when each has its own (Quest,
Twilight).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moira_kernels.checks import describe, require_divisible, require_tensor

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class PagedKV:
    """A paged KV cache seen through views; nothing is copied.

    Attributes:
        k: keys, [num_pages, H_kv, page_size, D] in bf16, fp16 or fp32. The last dimension is contiguous; the other
            strides are free, so token-major (NHD), head-major (HND) and fused [.., 2D] storages all fit.
        v: values, same shape and dtype as ``k``; strides of its own.
        block_table: [B, max_pages] int32, physical page ids of each request in order. Entries past
            ceil(seq_lens / page_size) are undefined.
        seq_lens: [B] int32, tokens of each request including the current one; 0 marks a graph-padding row.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    def __post_init__(self) -> None:
        require_tensor("kv.k", self.k, (None, None, None, None), CACHE_DTYPES)
        require_tensor("kv.v", self.v, tuple(self.k.shape), self.k.dtype, self.k.device)
        for name, tensor in (("kv.k", self.k), ("kv.v", self.v)):
            if tensor.stride(-1) != 1:
                raise ValueError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}")
        require_tensor("kv.seq_lens", self.seq_lens, (None,), torch.int32, self.k.device)
        require_tensor("kv.block_table", self.block_table, (self.batch, None), torch.int32, self.k.device)

    @classmethod
    def from_fused(cls, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> PagedKV:
        """The view of a cache [num_pages, H_kv, page_size, 2D] whose last dimension holds K then V (vLLM >= 0.30)."""
        if cache.dim() != 4 or cache.shape[-1] % 2:
            raise ValueError(f"cache: expected [num_pages, H_kv, page_size, 2D], got {describe(cache)}")
        head_dim = cache.shape[-1] // 2
        return cls(cache[..., :head_dim], cache[..., head_dim:], block_table, seq_lens)

    @property
    def batch(self) -> int:
        """B, the number of requests (padding rows included)."""
        return self.seq_lens.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """S, tokens per page."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k.shape[3]

    @property
    def max_pages(self) -> int:
        """Width of the block table: the most pages a request can have."""
        return self.block_table.shape[1]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one KV head, K and V together."""
        return 2 * self.page_size * self.head_dim * self.k.element_size()

    def num_pages(self) -> torch.Tensor:
        """[B] int32, pages that hold tokens: ceil(seq_lens / page_size)."""
        return (self.seq_lens + self.page_size - 1) // self.page_size

    def last_page_len(self) -> torch.Tensor:
        """[B] int32, tokens in each request's current (last) page, 1..page_size; 0 for a padding row."""
        return torch.where(self.seq_lens > 0, (self.seq_lens - 1) % self.page_size + 1, 0).to(torch.int32)


@dataclass(frozen=True)
class RaggedPages:
    """One page list per row, lists of different lengths.

    Two requests with two list heads each and 64-token pages; request 0 has 200 tokens (pages 7, 2, 9, 4 of the
    cache), request 1 is a padding row:

        page_ids      = [[[7, 9, 4, ?], [7, 4, ?, ?]], [[?, ?, ?, ?], [?, ?, ?, ?]]]
        lengths       = [[3, 2], [0, 0]]
        last_page_len = [[8, 8], [0, 0]]         200 = 3 * 64 + 8

    Attributes:
        page_ids: [B, H, max_pages] int32, physical page ids; entries past the row's length are undefined. A negative
            id is skipped by every kernel. A page listed twice counts twice in the softmax.
        lengths: [B, H] int32, pages listed per row.
        last_page_len: [B, H] int32, tokens that count in the last listed page of a row; all earlier pages are full.
    """

    page_ids: torch.Tensor
    lengths: torch.Tensor
    last_page_len: torch.Tensor

    def __post_init__(self) -> None:
        require_tensor("pages.page_ids", self.page_ids, (None, None, None), torch.int32)
        rows = (self.batch, self.num_lists)
        require_tensor("pages.lengths", self.lengths, rows, torch.int32, self.page_ids.device)
        require_tensor("pages.last_page_len", self.last_page_len, rows, torch.int32, self.page_ids.device)
        if self.page_ids.stride(-1) != 1:
            raise ValueError(f"pages.page_ids: expected a contiguous last dimension, got {self.page_ids.stride()}")
        for name in ("lengths", "last_page_len"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"pages.{name}: expected a contiguous tensor, got {getattr(self, name).stride()}")

    @property
    def batch(self) -> int:
        """B, the number of requests."""
        return self.page_ids.shape[0]

    @property
    def num_lists(self) -> int:
        """H, lists per request."""
        return self.page_ids.shape[1]

    @property
    def num_rows(self) -> int:
        """B * H."""
        return self.batch * self.num_lists

    def num_tokens(self, page_size: int) -> torch.Tensor:
        """[B, H] int32, tokens listed per row."""
        return torch.where(self.lengths > 0, (self.lengths - 1) * page_size + self.last_page_len, 0)


def check_attention_arguments(q: torch.Tensor, kv: PagedKV, pages: RaggedPages) -> None:
    """Raise ``ValueError`` unless q [B, H_q, D], the cache and the lists fit together."""
    require_tensor("q", q, (kv.batch, None, kv.head_dim), kv.k.dtype, kv.k.device)
    if q.stride(-1) != 1:
        raise ValueError(f"q: expected a contiguous last dimension, got strides {q.stride()}")
    require_divisible("q heads", q.shape[1], "KV heads", kv.num_kv_heads)
    require_divisible("list heads", pages.num_lists, "KV heads", kv.num_kv_heads)
    require_divisible("q heads", q.shape[1], "list heads", pages.num_lists)
    require_tensor("pages.page_ids", pages.page_ids, (kv.batch, None, None), torch.int32, kv.k.device)
