"""Decode attention as other libraries take it: sequences of one query token, each with one list of pages.

``Rows`` makes every row (request, list head) a sequence of its own with one KV head and G query heads, because a list
per head is more than a block table can say. Nothing is copied: the cache is seen as pages of a single KV head,

    id in this view = page id * factor + KV head,        factor = page stride / head stride,

with the head stride as page stride. In token-major (NHD) caches these pages lie inside one another, which does not
matter to a kernel that addresses pages by their strides, as FA3's and FlashInfer's do.

The ids in this numbering, and lengths in tokens, are written on the device by ``Rows.refresh``. No arm's time holds
that: a selector that works for such a kernel writes them in this form itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moira_kernels import UnsupportedError
from moira_kernels.attention import Workspace, attend
from moira_kernels.layout import PagedKV, RaggedPages


@dataclass(frozen=True)
class Sequences:
    """N sequences of one query token over a paged cache.

    Attributes:
        q, out: [N, H_q, D].
        k, v: [pages, page_size, H_kv, D] views, last dimension contiguous, other strides free.
        page_table: [N, width] int32; entries past a sequence's end are undefined.
        seq_lens: [N] int32, tokens of each sequence.
    """

    q: torch.Tensor
    out: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def page_size(self) -> int:
        """S, tokens per page."""
        return self.k.shape[1]

    @property
    def max_tokens(self) -> int:
        """Most tokens that a sequence can have."""
        return self.page_table.shape[1] * self.page_size

    def narrow(self, first: int, count: int, width: int) -> Sequences:
        """Sequences first .. first + count - 1, which have at most ``width`` pages."""
        part = slice(first, first + count)
        return replace(
            self,
            q=self.q[part],
            out=self.out[part],
            page_table=self.page_table[part, :width],
            seq_lens=self.seq_lens[part],
        )


def requests(q: torch.Tensor, out: torch.Tensor, kv: PagedKV) -> Sequences:
    """Every request as one sequence with all its KV heads: dense attention over the block table as it is."""
    return Sequences(q, out, kv.k.transpose(1, 2), kv.v.transpose(1, 2), kv.block_table, kv.seq_lens)


class Rows:
    """The rows of ``pages`` as sequences. ``sequences`` is rewritten in place by ``refresh``.

    Raises:
        UnsupportedError: a cache whose page stride is not a multiple of its head stride, or with too many pages.
    """

    def __init__(self, q: torch.Tensor, out: torch.Tensor, kv: PagedKV, pages: RaggedPages):
        self.pages, self.page_size = pages, kv.page_size
        self.factor = page_factor("kv.k", kv.k)
        if page_factor("kv.v", kv.v) != self.factor:
            raise UnsupportedError(
                f"kv.k and kv.v differ in page stride / head stride: {kv.k.stride()}, {kv.v.stride()}"
            )
        if kv.k.shape[0] * self.factor >= 2**31:
            raise UnsupportedError(f"{kv.k.shape[0]} pages x {self.factor} do not fit in int32 page ids")
        rows, group = pages.num_rows, q.shape[1] // pages.num_lists
        heads = torch.arange(pages.num_lists, dtype=torch.int32, device=q.device)
        self.kv_head = (heads // (pages.num_lists // kv.num_kv_heads))[:, None]
        self.sequences = Sequences(
            q.view(rows, group, -1),
            out.view(rows, group, -1),
            one_head_pages(kv.k, self.factor),
            one_head_pages(kv.v, self.factor),
            torch.empty((rows, pages.page_ids.shape[2]), dtype=torch.int32, device=q.device),
            torch.empty(rows, dtype=torch.int32, device=q.device),
        )
        self.refresh()

    def refresh(self) -> None:
        """Write page ids and lengths again after the lists have changed; device work only."""
        self.sequences.page_table.copy_((self.pages.page_ids * self.factor + self.kv_head).flatten(0, 1))
        self.sequences.seq_lens.copy_(self.pages.num_tokens(self.page_size).flatten())


def page_factor(name: str, cache: torch.Tensor) -> int:
    """Page stride / head stride of ``cache`` [pages, H_kv, S, D]: ids of one-head pages are page id * this + KV head.

    Raises ``UnsupportedError`` naming the tensor if the strides do not divide.
    """
    page, head = cache.stride()[:2]
    if cache.shape[1] == 1:  # the stride of the only head means nothing
        return 1
    if head == 0 or page % head:
        raise UnsupportedError(
            f"{name}: expected a page stride that is a multiple of the head stride, got {page}, {head}"
        )
    return page // head


def one_head_pages(cache: torch.Tensor, factor: int) -> torch.Tensor:
    """[pages, H_kv, S, D] -> [(pages - 1) * factor + H_kv, S, 1, D], a view."""
    pages, heads, page_size, head_dim = cache.shape
    page, head, token, _ = cache.stride()
    stride = page if heads == 1 else head
    return cache.as_strided(((pages - 1) * factor + heads, page_size, 1, head_dim), (stride, token, stride, 1))


class Attend:
    """``moira_kernels.attend`` over sequences with one KV head each, for arms that run without another library.

    ``because`` is why the library does not run.
    """

    def __init__(self, sequences: Sequences, because: str):
        self.name = f"moira_kernels.attend ({because})"
        s = self.sequences = sequences
        self.kv = PagedKV(s.k.transpose(1, 2), s.v.transpose(1, 2), s.page_table, s.seq_lens)
        self.lists = RaggedPages(s.page_table[:, None], self.kv.num_pages()[:, None], self.kv.last_page_len()[:, None])
        self.workspace = Workspace.allocate(len(s.q), s.q.shape[1], 1, s.q.shape[2], s.q.device)

    def schedule(self) -> None:
        """Lengths in pages, again after they have changed."""
        self.lists.lengths.copy_(self.kv.num_pages()[:, None])
        self.lists.last_page_len.copy_(self.kv.last_page_len()[:, None])

    def __call__(self) -> None:
        """Write ``sequences.out``."""
        attend(self.sequences.q, self.kv, self.lists, out=self.sequences.out, workspace=self.workspace)
