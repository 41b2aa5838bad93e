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
- equal shares at tau are all kept. Shares are float32; their sums are float64 in the references, float32 on the device.

On the device one thread block holds a row's shares in registers, whatever the rows of the batch, so a row's list does
not depend on its batch. The fixed-count mode bisects the bits of the shares (non-negative floats order like their
bits), which finds the K-th largest share exactly.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moira_kernels.checks import require_divisible, require_tensor
from moira_kernels.device import use_pdl
from moira_kernels.layout import PagedKV, RaggedPages

BISECTION_BITS = 24
THRESHOLDS = 4
"""Thresholds that the kernel looks at in a pass: 11 passes for 24 bits, the fastest at 128 and at 2,048 pages."""
SHORT_PAGES = 256
"""A row of no more pages is selected at this width, however wide the block table is."""


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


def warps_for(block_p: int) -> int:
    """Warps of a thread block that holds ``block_p`` pages, by the row's width alone: a row's sums, and with them its
    list, must not depend on its batch.
    """
    return min(16, max(1, block_p // 256))


@triton.jit
def _select_row(
    num_pages,
    log_mass_ptr,  # of the row's first query head
    table_ptr,
    count_ptr,
    page_ids_ptr,
    length_ptr,
    gamma,
    max_pages,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FIXED_COUNT: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    PASSES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the list of a row of 1 to BLOCK_P pages."""
    p = tl.arange(0, BLOCK_P)
    g = tl.arange(0, BLOCK_G)
    valid = p < num_pages
    forced = valid & ((p == 0) | (p == num_pages - 1))
    middle = valid & (p > 0) & (p < num_pages - 1)
    page = tl.load(table_ptr + p, mask=valid, other=0)
    if PDL:  # what came before is there already: only the masses are Estimate's
        gdc_wait()
        gdc_launch_dependents()
    log_mass = tl.load(
        log_mass_ptr + g[:, None] * max_pages + p[None, :],
        mask=(g[:, None] < GROUP) & valid[None, :],
        other=-float("inf"),
    )
    # The padding of the group has no largest: it must not become NaN.
    largest = tl.where(g < GROUP, tl.max(log_mass, 1), 0.0)
    mass = tl.exp(log_mass - largest[:, None])
    total = tl.where(g < GROUP, tl.sum(mass, 1), 1.0)
    share = tl.sum(mass / total[:, None], 0) / GROUP
    inner = tl.where(middle, share, 0.0)

    if KEEP_ALL:
        keep = valid
    elif FIXED_COUNT:
        # Bits of non-negative floats order like the floats. lo: enough pages reach it; hi: too few do.
        wanted = tl.load(count_ptr) - tl.sum(forced.to(tl.int32), 0)
        bits = tl.where(middle, share.to(tl.int32, bitcast=True), -1)
        lo = 0
        hi = 0x3F800001  # one above the bits of 1.0
        for _ in range(31):
            middle_bits = lo + (hi - lo) // 2
            enough = tl.sum((bits >= middle_bits).to(tl.int32), 0) >= wanted
            lo = tl.where(enough, middle_bits, lo)
            hi = tl.where(enough, hi, middle_bits)
        above = bits > lo
        tied = bits == lo
        # Of equal shares the lower page index wins.
        left = wanted - tl.sum(above.to(tl.int32), 0)
        keep = forced | above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= left))
    else:
        # Algorithm 1. The mass at lo is known to suffice, so all thresholds of a pass lie above it.
        t = gamma - tl.sum(tl.where(forced, share, 0.0), 0)
        lo = 0.0
        hi = tl.max(inner, 0)
        part = (tl.arange(0, THRESHOLDS) + 1).to(tl.float32) / (THRESHOLDS + 1)
        for _ in range(PASSES):
            tau = lo + (hi - lo) * part
            mass_above = tl.sum(tl.where(inner[None, :] >= tau[:, None], inner[None, :], 0.0), 1)
            enough = mass_above >= t
            hi = tl.minimum(hi, tl.min(tl.where(enough, float("inf"), tau), 0))
            lo = tl.maximum(lo, tl.max(tl.where(enough, tau, 0.0), 0))
        keep = forced | (middle & (share >= tl.where(t > 0, lo, float("inf"))))

    # A boolean would be summed in one bit.
    kept = tl.cumsum(keep.to(tl.int32), 0)
    tl.store(page_ids_ptr + kept - 1, page, mask=keep)
    # The current page is always kept, so the count there is the length.
    tl.store(length_ptr + 0 * p, kept, mask=p == num_pages - 1)


@triton.jit
def _select_kernel(
    log_mass_ptr,  # [B, H_q, max_pages] float32
    block_table_ptr,  # [B, max_pages] int32
    seq_lens_ptr,  # [B] int32
    counts_ptr,  # [H] int32 (fixed-count mode)
    page_ids_ptr,  # [B, H, max_pages] int32
    lengths_ptr,  # [B, H] int32
    last_page_len_ptr,  # [B, H] int32
    gamma,
    max_pages,
    stride_table_batch,
    NUM_LISTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SHORT_P: tl.constexpr,
    FIXED_COUNT: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    PASSES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch = row // NUM_LISTS
    seq_len = tl.load(seq_lens_ptr + batch)
    num_pages = tl.cdiv(seq_len, PAGE_SIZE)
    log_mass = log_mass_ptr + row * GROUP * max_pages
    table = block_table_ptr + batch * stride_table_batch
    count = counts_ptr + row % NUM_LISTS
    page_ids = page_ids_ptr + row * max_pages
    length = lengths_ptr + row
    if num_pages == 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        tl.store(length, 0)
    elif num_pages <= SHORT_P:
        _select_row(
            num_pages,
            log_mass,
            table,
            count,
            page_ids,
            length,
            gamma,
            max_pages,
            GROUP,
            BLOCK_G,
            SHORT_P,
            FIXED_COUNT,
            KEEP_ALL,
            THRESHOLDS,
            PASSES,
            PDL,
        )
    elif BLOCK_P > SHORT_P:
        _select_row(
            num_pages,
            log_mass,
            table,
            count,
            page_ids,
            length,
            gamma,
            max_pages,
            GROUP,
            BLOCK_G,
            BLOCK_P,
            FIXED_COUNT,
            KEEP_ALL,
            THRESHOLDS,
            PASSES,
            PDL,
        )
    tl.store(last_page_len_ptr + row, tl.where(seq_len > 0, (seq_len - 1) % PAGE_SIZE + 1, 0))


def launch(
    log_mass: torch.Tensor,
    kv: PagedKV,
    pages: RaggedPages,
    *,
    gamma: float | None = None,
    counts: torch.Tensor | None = None,
    after_estimate: bool = False,
) -> None:
    """Select on the device: log_mass [B, H_q, max_pages] float32 -> ``pages``, whose tensors are overwritten.

    Give either ``gamma`` (the coverage rule) or ``counts`` [H] int32 on the device (exactly that many pages per KV
    head, forced ones included). ``after_estimate`` says that the last kernel launched on this stream is Estimate's:
    then this one starts beside it, and reads sequence lengths and block table before Estimate has ended.
    """
    B, H, P = pages.page_ids.shape
    require_tensor("log_mass", log_mass, (B, None, kv.max_pages), torch.float32, kv.k.device)
    require_tensor("pages.page_ids", pages.page_ids, (kv.batch, None, kv.max_pages), torch.int32, kv.k.device)
    if (gamma is None) == (counts is None):
        raise ValueError("gamma, counts: expected exactly one of them")
    if counts is not None:
        require_tensor("counts", counts, (H,), torch.int32, kv.k.device)
    if not (log_mass.is_contiguous() and pages.page_ids.is_contiguous()):
        raise ValueError("log_mass, pages.page_ids: expected contiguous tensors")
    pdl = after_estimate and use_pdl(log_mass.device)
    block_p = max(16, triton.next_power_of_2(P))
    _select_kernel[(B * H,)](
        log_mass,
        kv.block_table,
        kv.seq_lens,
        pages.lengths if counts is None else counts,
        pages.page_ids,
        pages.lengths,
        pages.last_page_len,
        1.0 if gamma is None else gamma,
        P,
        kv.block_table.stride(0),
        NUM_LISTS=H,
        GROUP=log_mass.shape[1] // H,
        BLOCK_G=triton.next_power_of_2(log_mass.shape[1] // H),
        PAGE_SIZE=kv.page_size,
        BLOCK_P=block_p,
        SHORT_P=min(block_p, SHORT_PAGES),
        FIXED_COUNT=counts is not None,
        KEEP_ALL=gamma is not None and gamma >= 1,
        THRESHOLDS=THRESHOLDS,
        PASSES=math.ceil(BISECTION_BITS / math.log2(THRESHOLDS + 1)),
        PDL=pdl,
        num_warps=warps_for(block_p),
        launch_pdl=pdl,
    )
