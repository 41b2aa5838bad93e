"""Estimate: the log attention mass of every page for every query head.

The mass of a page for query head g is m_{g,P} = sum_{k in P} exp(s q_g . k) with s the softmax scale. From the page's
summary alone (Equation 2, "mvar"),

    log m^_{g,P} = s q_g . mu_P  +  1/2 (s q_g)^2 . sigma_P^2  +  log S,

which is exact when the page's keys are independent Gaussians per channel. The first page (attention sink) and the
current page (no summary yet) are computed exactly from their keys.

On the device a thread block takes a run of one row's inner pages, or its first page, or its current page; the last also
writes the page's summary if the page has just been filled, so decoding needs no other summary kernel. How many thread
blocks a row gets depends on the batch alone, so a block table wider than the row costs nothing.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from moira_kernels.checks import require_divisible, require_tensor
from moira_kernels.device import INTERPRETED, multiprocessors, require_supported_sizes, use_pdl
from moira_kernels.layout import PagedKV
from moira_kernels.merge import LN2
from moira_kernels.summary import PageSummaries, summarize_page, tile_tokens

TILE_PAGES = 32
"""Inner pages that a thread block of Estimate takes at once."""
NUM_WARPS = 2
BLOCKS_PER_MULTIPROCESSOR = 8
"""Thread blocks of Estimate that registers and shared memory let stay on a multiprocessor together."""


def mvar_log_mass(
    q: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, scale: float, page_size: int
) -> torch.Tensor:
    """Equation (2): q [.., G, D], mean and variance [.., P, D] -> log mass [.., G, P], all float32."""
    scaled = scale * q
    return scaled @ mean.mT + 0.5 * scaled.square() @ variance.mT + math.log(page_size)


def _logits_of_page(q: torch.Tensor, kv: PagedKV, index: torch.Tensor, scale: float) -> torch.Tensor:
    """Logits of one page per request: q [B, H_kv, G, D], index [B] page -> [B, H_kv, G, S], -inf past the end."""
    physical = kv.block_table.gather(1, index[:, None].long())[:, 0].long()
    keys = kv.k[physical]
    token = index[:, None] * kv.page_size + torch.arange(kv.page_size, device=q.device)
    valid = (token < kv.seq_lens[:, None])[:, None, :, None]
    keys = torch.where(valid, keys.float(), 0.0)
    return (scale * q @ keys.mT).masked_fill(~valid.mT, -math.inf)


def _check(q: torch.Tensor, kv: PagedKV) -> int:
    """Query heads per KV head, G."""
    require_tensor("q", q, (kv.batch, None, kv.head_dim), kv.k.dtype, kv.k.device)
    require_divisible("q heads", q.shape[1], "KV heads", kv.num_kv_heads)
    return q.shape[1] // kv.num_kv_heads


def _grouped(q: torch.Tensor, kv: PagedKV, scale: float | None) -> tuple[torch.Tensor, float]:
    """(q as [B, H_kv, G, D] float32, the softmax scale)."""
    return q.float().unflatten(1, (-1, _check(q, kv))), kv.head_dim**-0.5 if scale is None else scale


def reference(q: torch.Tensor, kv: PagedKV, summaries: PageSummaries, scale: float | None = None) -> torch.Tensor:
    """Log mass [B, H_q, max_pages] float32 of each page; -inf past a request's last page.

    q is [B, H_q, D]; ``scale`` is the softmax scale, 1/sqrt(D) by default. Inner pages follow Equation (2); the first
    and the current page are exact.
    """
    grouped, scale = _grouped(q, kv, scale)
    P = kv.max_pages
    num_pages = kv.num_pages()
    column = torch.arange(P, device=q.device)
    inner = (column > 0) & (column < num_pages[:, None] - 1)
    physical = torch.where(inner, kv.block_table, 0).long()
    log_mass = torch.full((kv.batch, kv.num_kv_heads, grouped.shape[2], P), -math.inf, device=q.device)
    for b in range(kv.batch):
        mean = summaries.mean[physical[b]].float().transpose(0, 1)
        variance = summaries.variance[physical[b]].float().transpose(0, 1)
        estimate = mvar_log_mass(grouped[b], mean, variance, scale, kv.page_size)
        log_mass[b] = torch.where(inner[b], estimate, -math.inf)
    for index in (torch.zeros_like(num_pages), (num_pages - 1).clamp(min=0)):
        exact = _logits_of_page(grouped, kv, index, scale).logsumexp(-1)
        exact = torch.where((num_pages > 0)[:, None, None], exact, -math.inf)
        log_mass.scatter_(3, index[:, None, None, None].expand(*exact.shape, 1).long(), exact[..., None])
    return log_mass.flatten(1, 2)


def exact_reference(q: torch.Tensor, kv: PagedKV, scale: float | None = None) -> torch.Tensor:
    """The true log mass, same shape as ``reference``: every page from its keys (the oracle of Equation 1)."""
    grouped, scale = _grouped(q, kv, scale)
    num_pages = kv.num_pages()
    log_mass = torch.full((*grouped.shape[:3], kv.max_pages), -math.inf, device=q.device)
    for b, pages in enumerate(num_pages.tolist()):
        if pages == 0:
            continue
        keys = kv.k[kv.block_table[b, :pages].long()].float().transpose(0, 1).flatten(1, 2)
        valid = torch.arange(keys.shape[1], device=q.device) < kv.seq_lens[b]
        keys = torch.where(valid[:, None], keys, 0.0)
        logits = (scale * grouped[b] @ keys.mT).masked_fill(~valid, -math.inf)
        log_mass[b, :, :, :pages] = logits.unflatten(-1, (pages, kv.page_size)).logsumexp(-1)
    return log_mass.flatten(1, 2)


@triton.jit
def _dot(q, x, INTERPRETED: tl.constexpr):
    """q [M, K] times x [N, K] transposed, float32 sums of exact products."""
    if INTERPRETED:  # the interpreter multiplies the bit patterns of bf16 operands
        result = tl.dot(q.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
    else:
        result = tl.dot(q, tl.trans(x), input_precision="ieee")
    return result


@triton.jit
def _estimate_kernel(
    q_ptr,
    k_ptr,
    mean_ptr,  # [num_pages, H_kv, D] bf16
    variance_ptr,
    block_table_ptr,  # [B, max_pages] int32
    seq_lens_ptr,  # [B] int32
    log_mass_ptr,  # [B, H_q, max_pages] float32
    scale,
    max_pages,
    stride_q_batch,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    stride_summary_page,
    stride_summary_head,
    stride_table_batch,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if PDL:  # Select may start: it waits for this kernel's results
        gdc_launch_dependents()
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)  # 0: first page, 1: current page, then equal runs of the pages
    table = block_table_ptr + batch * stride_table_batch
    seq_len = tl.load(seq_lens_ptr + batch)
    num_pages = tl.cdiv(seq_len, PAGE_SIZE)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, TILE)
    q = tl.load(
        q_ptr + batch * stride_q_batch + (head * GROUP + g[:, None]) * stride_q_head + d[None, :],
        mask=(g[:, None] < GROUP) & (d[None, :] < HEAD_DIM),
        other=0.0,
    )
    out = log_mass_ptr + ((batch * tl.num_programs(0) + head) * GROUP + g[:, None]) * max_pages
    if part < 2:
        # A row of one page is covered by its first page, an empty row by nobody.
        if num_pages > part:
            index = tl.where(part == 0, 0, num_pages - 1)
            page = tl.load(table + index).to(tl.int64)
            key = k_ptr + page * stride_k_page + head.to(tl.int64) * stride_k_head
            tokens = tl.minimum(seq_len - index * PAGE_SIZE, PAGE_SIZE)
            s = tl.arange(0, TILE_S)
            largest = tl.full([BLOCK_G], -float("inf"), tl.float32)
            mass = tl.zeros([BLOCK_G], tl.float32)
            for start in range(0, tokens, TILE_S):
                valid = start + s < tokens
                k = tl.load(
                    key + (start + s)[:, None] * stride_k_token + d[None, :],
                    mask=valid[:, None] & (d[None, :] < HEAD_DIM),
                    other=0.0,
                )
                logits = _dot(q, k, INTERPRETED) * (scale * 1.4426950408889634)
                logits = tl.where(valid[None, :], logits, -float("inf"))
                new_largest = tl.maximum(largest, tl.max(logits, 1))
                mass = mass * tl.exp2(largest - new_largest) + tl.sum(tl.exp2(logits - new_largest[:, None]), 1)
                largest = new_largest
            exact = (largest + tl.log2(mass)) * LN2
            tl.store(out + index, exact[:, None], mask=g[:, None] < GROUP)
            # Also for a row of one page, whose first page is its current page.
            if (index == num_pages - 1) & (tokens == PAGE_SIZE):
                summary = page * stride_summary_page + head * stride_summary_head
                summarize_page(
                    key,
                    mean_ptr + summary,
                    variance_ptr + summary,
                    stride_k_token,
                    PAGE_SIZE,
                    HEAD_DIM,
                    TILE_S,
                    BLOCK_D,
                )
    else:
        # The square of a bf16 has 16 bits, and an fp16 has 11: as sums of two bf16 they are exact, so all products are.
        # (The square of an fp16 is cut to 16 bits.)
        squared = q.to(tl.float32) * q.to(tl.float32)
        high = squared.to(tl.bfloat16)
        low = (squared - high.to(tl.float32)).to(tl.bfloat16)
        q_high = q.to(tl.bfloat16)
        q_low = (q.to(tl.float32) - q_high.to(tl.float32)).to(tl.bfloat16)
        log_size = tl.log2(tl.full([1, 1], PAGE_SIZE, tl.float32)) * LN2
        run = tl.cdiv(num_pages, (tl.num_programs(2) - 2) * TILE) * TILE
        begin = (part - 2) * run
        for first in range(begin, tl.minimum(begin + run, num_pages - 1), TILE):
            p = first + t
            inner = (p > 0) & (p < num_pages - 1)
            pages = tl.load(table + p, mask=inner, other=0).to(tl.int64)
            offset = (pages * stride_summary_page)[:, None] + head * stride_summary_head + d[None, :]
            mask = inner[:, None] if HEAD_DIM == BLOCK_D else inner[:, None] & (d[None, :] < HEAD_DIM)
            mean = tl.load(mean_ptr + offset, mask=mask, other=0.0)
            variance = tl.load(variance_ptr + offset, mask=mask, other=0.0)
            spread = _dot(high, variance, INTERPRETED) + _dot(low, variance, INTERPRETED)
            centre = _dot(q_high, mean, INTERPRETED)
            if q_ptr.dtype.element_ty != tl.bfloat16:
                centre += _dot(q_low, mean, INTERPRETED)
            log_mass = scale * centre + (0.5 * scale * scale) * spread + log_size
            tl.store(out + p[None, :], log_mass, mask=(g[:, None] < GROUP) & inner[None, :])


def parts_per_row(rows: int, max_pages: int, multiprocessors: int) -> int:
    """Thread blocks that share a row's inner pages: about as many as stay resident on the device together, and no more
    than the row has tiles.
    """
    resident = BLOCKS_PER_MULTIPROCESSOR * multiprocessors
    return max(1, min(resident // rows, triton.cdiv(max_pages, TILE_PAGES)))


def launch(
    q: torch.Tensor, kv: PagedKV, summaries: PageSummaries, log_mass: torch.Tensor, scale: float | None = None
) -> None:
    """Estimate on the device into ``log_mass`` [B, H_q, max_pages] float32. Entries past a request's last page are not
    written. The summary of a current page that is full is (re)built.
    """
    group = _check(q, kv)
    require_tensor("log_mass", log_mass, (kv.batch, q.shape[1], kv.max_pages), torch.float32, q.device)
    require_tensor("summaries.mean", summaries.mean, (kv.k.shape[0], kv.num_kv_heads, kv.head_dim), torch.bfloat16)
    require_supported_sizes(q.device, group, kv)
    parts = parts_per_row(kv.batch * kv.num_kv_heads, kv.max_pages, multiprocessors(q.device))
    _estimate_kernel[(kv.num_kv_heads, kv.batch, 2 + parts)](
        q,
        kv.k,
        summaries.mean,
        summaries.variance,
        kv.block_table,
        kv.seq_lens,
        log_mass,
        kv.head_dim**-0.5 if scale is None else scale,
        kv.max_pages,
        *q.stride()[:2],
        *kv.k.stride()[:3],
        *summaries.mean.stride()[:2],
        kv.block_table.stride(0),
        GROUP=group,
        BLOCK_G=16,
        HEAD_DIM=kv.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(kv.head_dim)),
        PAGE_SIZE=kv.page_size,
        TILE_S=tile_tokens(kv.page_size),
        TILE=TILE_PAGES,
        PDL=use_pdl(q.device),
        INTERPRETED=INTERPRETED,
        num_warps=NUM_WARPS,
        num_stages=3,
    )
