"""Estimate: the log attention mass of every page for every query head.

The mass of a page for query head g is m_{g,P} = sum_{k in P} exp(s q_g . k) with s the softmax scale. From the page's
summary alone (Equation 2, "mvar"),

    log m^_{g,P} = s q_g . mu_P  +  1/2 (s q_g)^2 . sigma_P^2  +  log S,

which is exact when the page's keys are independent Gaussians per channel. The first page (attention sink) and the
current page (no summary yet) are computed exactly from their keys.
"""

from __future__ import annotations

import math

import torch

from moira_kernels.checks import require_divisible, require_tensor
from moira_kernels.layout import PagedKV
from moira_kernels.summary import PageSummaries


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


def _check(q: torch.Tensor, kv: PagedKV, scale: float | None) -> tuple[torch.Tensor, float]:
    require_tensor("q", q, (kv.batch, None, kv.head_dim), kv.k.dtype, kv.k.device)
    require_divisible("q heads", q.shape[1], "KV heads", kv.num_kv_heads)
    grouped = q.float().unflatten(1, (kv.num_kv_heads, -1))
    return grouped, kv.head_dim**-0.5 if scale is None else scale


def reference(q: torch.Tensor, kv: PagedKV, summaries: PageSummaries, scale: float | None = None) -> torch.Tensor:
    """Log mass [B, H_q, max_pages] float32 of each page; -inf past a request's last page.

    q is [B, H_q, D]; ``scale`` is the softmax scale, 1/sqrt(D) by default. Inner pages follow Equation (2); the first
    and the current page are exact.
    """
    grouped, scale = _check(q, kv, scale)
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
    grouped, scale = _check(q, kv, scale)
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
