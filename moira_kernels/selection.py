"""Select: which pages each row keeps.

The shares of a row are the group mean of the softmax over pages of every query head's log mass,

    pi_P = (1/G) sum_g softmax_P(l_{g,P}).

The coverage rule (Equation 3) always keeps the first page P_0 and the current page P_cur, and of the pages between
them those with share at least

    tau = max { tau : sum_{P : pi_P >= tau} pi_P  >=  t },        t = gamma - pi_{P_0} - pi_{P_cur}.

``coverage_sorted`` is that definition, by sorting; ``coverage_bisection`` is Algorithm 1, which finds tau to
2^-24 of the largest share by K_B-ary bisection and never sorts. Edges that the paper leaves open, the same in both:

- t <= 0, the two forced pages reach gamma alone: no page between them is kept. (Algorithm 1 as printed would keep the
  largest.)
- gamma >= 1: every page is kept, so that the result is dense attention even where an estimated share underflows.
- rows of 4,096 pages or more: K_B = 2, as below 4,096.
- equal shares at tau are all kept. Shares are float32; their sums are float64.
"""

from __future__ import annotations

import math

import torch

from moira_kernels.checks import require_divisible, require_tensor
from moira_kernels.layout import PagedKV, RaggedPages

BISECTION_BITS = 24


def group_shares(log_mass: torch.Tensor, num_lists: int) -> torch.Tensor:
    """Shares [B, H, P] float32 from log masses [B, H_q, P] float32 (-inf = no page), averaged over H_q / H heads.

    A row without pages (all -inf) has share 0 everywhere.
    """
    require_tensor("log_mass", log_mass, (None, None, None), torch.float32)
    require_divisible("log_mass heads", log_mass.shape[1], "list heads", num_lists)
    shares = torch.softmax(log_mass, dim=-1).nan_to_num(nan=0.0)
    return shares.unflatten(1, (num_lists, -1)).mean(dim=2)


def thresholds_per_pass(max_pages: int) -> int:
    """K_B: 8, 4 and 2 for rows of fewer than 256, 1,024 and any more pages."""
    return 8 if max_pages < 256 else 4 if max_pages < 1024 else 2


def _regions(shares: torch.Tensor, num_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks [B, 1, P] of the forced pages (first and current) and of the pages between them; num_pages is [B] int."""
    require_tensor("shares", shares, (num_pages.shape[0], None, None), torch.float32)
    column = torch.arange(shares.shape[-1], device=shares.device)
    last = num_pages[:, None, None] - 1
    forced = ((column == 0) | (column == last)) & (column <= last)
    return forced, (column > 0) & (column < last)


def _target(shares: torch.Tensor, forced: torch.Tensor, gamma: float) -> torch.Tensor:
    """t [B, H] float64: the share still wanted beyond the forced pages. gamma is rounded to float32, like the shares:
    shares of .7 and .2 then reach a gamma of .9.
    """
    gamma = torch.tensor(gamma, dtype=torch.float32).item()
    return gamma - torch.where(forced, shares, 0.0).double().sum(-1)


def _apply_threshold(
    shares: torch.Tensor, tau: torch.Tensor, t: torch.Tensor, forced: torch.Tensor, middle: torch.Tensor, gamma: float
) -> torch.Tensor:
    if gamma >= 1:
        return (forced | middle).expand_as(shares)
    return forced | (middle & (shares >= tau[..., None]) & (t > 0)[..., None])


def coverage_sorted(shares: torch.Tensor, num_pages: torch.Tensor, gamma: float) -> torch.Tensor:
    """Equation (3) by sorting: shares [B, H, P], num_pages [B] int32 -> keep mask [B, H, P] bool."""
    forced, middle = _regions(shares, num_pages)
    t = _target(shares, forced, gamma)
    ordered = torch.where(middle, shares, 0.0).sort(dim=-1, descending=True).values
    reached = ordered.double().cumsum(-1) >= t[..., None]
    first = reached.int().argmax(-1, keepdim=True)
    tau = torch.where(reached.any(-1), ordered.gather(-1, first)[..., 0], 0.0)
    return _apply_threshold(shares, tau, t, forced, middle, gamma)


def coverage_bisection(
    shares: torch.Tensor, num_pages: torch.Tensor, gamma: float, thresholds: int | None = None
) -> torch.Tensor:
    """Algorithm 1: the same mask by bisection with K_B ``thresholds`` per pass (by row length if None).

    The kept set contains that of ``coverage_sorted``; what it has more lies below tau by at most 2^-24 of the largest
    share.
    """
    forced, middle = _regions(shares, num_pages)
    t = _target(shares, forced, gamma)
    K = thresholds_per_pass(shares.shape[-1]) if thresholds is None else thresholds
    inner = torch.where(middle, shares, 0.0)
    lo = torch.zeros_like(t, dtype=torch.float32)
    hi = inner.amax(-1)
    for _ in range(round(BISECTION_BITS / math.log2(K))):
        step = (hi - lo) / K
        taus = lo[..., None] + step[..., None] * torch.arange(K, device=shares.device)
        masses = torch.stack(
            [torch.where(inner >= tau[..., None], inner, 0.0).double().sum(-1) for tau in taus.unbind(-1)], dim=-1
        )
        enough = masses >= t[..., None]
        hi = torch.minimum(hi, torch.where(enough, math.inf, taus).amin(-1))
        lo = torch.maximum(lo, torch.where(enough, taus, 0.0).amax(-1))
    return _apply_threshold(shares, lo, t, forced, middle, gamma)


def largest(scores: torch.Tensor, num_pages: torch.Tensor, counts: torch.Tensor | int) -> torch.Tensor:
    """Fixed-count rule: keep exactly ``counts`` pages a row, the forced ones included.

    scores [B, H, P] float32; num_pages [B] int32; counts an int or [B, H] int. The first and the current page are
    always kept (so at least two of a row of two or more), then the largest scores; of equal scores the lower page index
    wins. A count of the row's length or more keeps the whole row.
    """
    forced, middle = _regions(scores, num_pages)
    ranked = torch.where(forced, math.inf, torch.where(middle, scores, -math.inf))
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    )
    counts = torch.as_tensor(counts, device=scores.device)
    return forced | (middle & (rank < counts[..., None]))


def compact(keep: torch.Tensor, kv: PagedKV) -> RaggedPages:
    """Page lists from a keep mask [B, H, P] bool over logical pages, in page order (sink first, current page last).

    Pages past a request's end are never listed. The current page must be kept, or the row be empty: only then is
    ``last_page_len`` the length of the row's last page.
    """
    require_tensor("keep", keep, (kv.batch, None, kv.max_pages), torch.bool, kv.k.device)
    column = torch.arange(kv.max_pages, device=keep.device)
    keep = keep & (column < kv.num_pages()[:, None, None])
    order = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)
    table = kv.block_table[:, None].expand_as(order)
    lengths = keep.sum(-1, dtype=torch.int32)
    last = kv.last_page_len()[:, None].expand_as(lengths)
    return RaggedPages(table.gather(-1, order), lengths, torch.where(lengths > 0, last, 0))
