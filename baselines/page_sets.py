"""Page lists made from page lists, for arms that read more than they were given. Device work only.

Lists are taken as sets: each page at most once, and the current page among them, as every selector here writes them.
"""

from __future__ import annotations

import torch

from moira_kernels.layout import PagedKV, RaggedPages
from moira_kernels.selection import compact


def kept(pages: RaggedPages, kv: PagedKV) -> torch.Tensor:
    """[B, H, max_pages] bool: the logical pages that each list names."""
    physical = kv.k.shape[0]
    column = torch.arange(pages.page_ids.shape[2], device=pages.page_ids.device)
    # Undefined entries go to a column of their own.
    ids = torch.where(column < pages.lengths[..., None], pages.page_ids, physical).long()
    named = torch.zeros((*ids.shape[:2], physical + 1), dtype=torch.bool, device=ids.device).scatter_(2, ids, True)
    logical = torch.arange(kv.max_pages, device=ids.device) < kv.num_pages()[:, None]
    table = torch.where(logical, kv.block_table, physical).long()[:, None].expand(-1, pages.num_lists, -1)
    return named.gather(2, table) & logical[:, None]


def extended(pages: RaggedPages, kv: PagedKV, lengths: torch.Tensor) -> RaggedPages:
    """The lists with pages that they left out, first ones first, up to ``lengths`` [B, H] int pages (or all pages).

    An empty list stays empty.
    """
    keep = kept(pages, kv)
    left_out = ~keep & (torch.arange(kv.max_pages, device=keep.device) < kv.num_pages()[:, None, None])
    wanted = torch.where(pages.lengths > 0, lengths - pages.lengths, 0)
    return compact(keep | (left_out & (left_out.cumsum(-1) <= wanted[..., None])), kv)


def union(pages: RaggedPages, kv: PagedKV) -> RaggedPages:
    """The union of a request's lists, once per KV head."""
    return compact(kept(pages, kv).any(1, keepdim=True).expand(-1, kv.num_kv_heads, -1), kv)


def missed(lists: RaggedPages, kv: PagedKV, pages: RaggedPages) -> int:
    """Pages that ``pages`` list and ``lists``, which may hold fewer lists per request, do not. Waits for the device."""
    if lists is pages:
        return 0
    wanted = kept(pages, kv).unflatten(1, (lists.num_lists, -1))
    return int((wanted & ~kept(lists, kv)[:, :, None]).sum())


def overwrite(target: RaggedPages, source: RaggedPages) -> None:
    """Copy ``source`` into the tensors of ``target``, which a captured graph may hold."""
    for name in ("page_ids", "lengths", "last_page_len"):
        getattr(target, name).copy_(getattr(source, name))
