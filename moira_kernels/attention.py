"""Attend: exact attention of one decode token over the listed pages, each row's list as long as it is.

For query head g of a row with listed keys k_i and values v_i and softmax scale s,

    o_g = sum_i exp(s q_g . k_i - l_g) v_i,        l_g = log sum_i exp(s q_g . k_i).

Rows are cut into chunks by Equation (4) (``moira_kernels.partition``): thread block (b, j) reads the row's length from
device memory, takes pages j c_b to (j + 1) c_b - 1 of the list and leaves at once if there are none (Algorithm 2). A
row of one chunk is written directly, the others are merged (``moira_kernels.merge``). All query heads of a row share
each key and value tile, so a page is read once per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moira_kernels import merge
from moira_kernels.checks import UnsupportedError, require_tensor
from moira_kernels.layout import PagedKV, RaggedPages, check_attention_arguments
from moira_kernels.partition import eq4_blocks_per_row, eq4_min_chunk_pages

MAX_GROUP = 16
MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 128
INTERPRETED = triton.knobs.runtime.interpret
"""True when kernels run in Triton's interpreter (TRITON_INTERPRET=1 at import), the only way to run them on a CPU."""


def reference(
    q: torch.Tensor,
    kv: PagedKV,
    pages: RaggedPages,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention row by row in ``dtype`` (float32: the truth; the cache's own dtype: what PyTorch loses in it).

    q is [B, H_q, D]. Returns the output [B, H_q, D] in ``dtype`` and the LSE [B, H_q] float32 (natural log). An empty
    row gives 0 and -inf. Lengths are read on the host.
    """
    check_attention_arguments(q, kv, pages)
    scale = kv.head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    group = q.shape[1] // pages.num_lists
    lists_per_kv_head = pages.num_lists // kv.num_kv_heads
    lengths = pages.lengths.tolist()
    last_page_len = pages.last_page_len.tolist()
    for b in range(pages.batch):
        for h in range(pages.num_lists):
            ids = pages.page_ids[b, h, : lengths[b][h]].long()
            tokens = torch.ones(ids.numel() * kv.page_size, dtype=torch.bool, device=q.device)
            if ids.numel():
                tokens[(ids.numel() - 1) * kv.page_size + last_page_len[b][h] :] = False
            tokens &= (ids >= 0).repeat_interleave(kv.page_size)
            ids = ids.clamp(min=0)
            keys = kv.k[ids, h // lists_per_kv_head].flatten(0, 1)[tokens].to(dtype)
            values = kv.v[ids, h // lists_per_kv_head].flatten(0, 1)[tokens].to(dtype)
            if not len(keys):
                continue
            heads = slice(h * group, (h + 1) * group)
            logits = (q[b, heads].to(dtype) @ keys.mT) * scale
            out[b, heads] = torch.softmax(logits, dim=-1) @ values
            lse[b, heads] = logits.float().logsumexp(-1)
    return out, lse


@triton.jit
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_ids_ptr,
    lengths_ptr,  # [rows] int32
    last_page_len_ptr,  # [rows] int32
    out_ptr,
    lse_ptr,  # [rows, G] float32
    partial_ptr,  # [rows, J, G, D] float32
    partial_lse_ptr,  # [rows, J, G] float32
    scale_log2,  # softmax scale * log2(e): the loop works in powers of two
    stride_q_batch,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    stride_ids_batch,
    stride_ids_head,
    stride_out_batch,
    stride_out_head,
    NUM_LISTS: tl.constexpr,
    LISTS_PER_KV_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    batch = row // NUM_LISTS
    list_head = row % NUM_LISTS
    kv_head = list_head // LISTS_PER_KV_HEAD
    length = tl.load(lengths_ptr + row)
    chunk, chunks = merge.row_chunks(length, MIN_CHUNK, BLOCKS_PER_ROW)
    # An empty row has no chunk; its first thread block stays to write the zeros.
    if j >= tl.maximum(chunks, 1):
        return

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, TILE)
    g_mask = g[:, None] < GROUP
    d_mask = d[None, :] < HEAD_DIM
    head = list_head * GROUP + g[:, None]
    q = tl.load(q_ptr + batch * stride_q_batch + head * stride_q_head + d[None, :], mask=g_mask & d_mask, other=0.0)
    if INTERPRETED:  # the interpreter multiplies the bit patterns of bf16 operands
        q = q.to(tl.float32)
    ids = page_ids_ptr + batch * stride_ids_batch + list_head * stride_ids_head
    k_base = k_ptr + kv_head * stride_k_head + d[None, :]
    v_base = v_ptr + kv_head * stride_v_head + d[None, :]
    row_tokens = (length - 1) * PAGE_SIZE + tl.load(last_page_len_ptr + row)
    first_token = j * chunk * PAGE_SIZE
    end_token = tl.minimum(first_token + chunk * PAGE_SIZE, row_tokens)

    running_max = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first_token, end_token, TILE):
        token = start + t
        page = tl.load(ids + token // PAGE_SIZE, mask=token < end_token, other=-1).to(tl.int64)
        slot = token % PAGE_SIZE
        valid = page >= 0
        kv_mask = valid[:, None] & d_mask
        k = tl.load(k_base + (page * stride_k_page + slot * stride_k_token)[:, None], mask=kv_mask, other=0.0)
        v = tl.load(v_base + (page * stride_v_page + slot * stride_v_token)[:, None], mask=kv_mask, other=0.0)
        if INTERPRETED:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp2(scores - safe_max[:, None])
        correction = tl.exp2(running_max - safe_max)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        running_max = new_max

    safe_total = tl.where(total > 0, total, 1.0)
    acc = acc / safe_total[:, None]
    lse = tl.where(total > 0, (running_max + tl.log2(safe_total)) * LN2, -float("inf"))
    if chunks <= 1:
        out = out_ptr + batch * stride_out_batch + head * stride_out_head + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=g_mask & d_mask)
        tl.store(lse_ptr + row * GROUP + g, lse, mask=g < GROUP)
    else:
        part = (row * BLOCKS_PER_ROW + j) * GROUP + g
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=g_mask & d_mask)
        tl.store(partial_lse_ptr + part, lse, mask=g < GROUP)


@dataclass(frozen=True)
class Workspace:
    """Scratch of one attend() shape, allocated once so that nothing is allocated on the decode path.

    Attributes:
        partials: [rows, J, G, D] float32, partial outputs; J = max(32, ceil(4096 / rows)).
        partial_lse: [rows, J, G] float32.
        lse: [B, H_q] float32.
    """

    partials: torch.Tensor
    partial_lse: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(
        cls,
        batch: int,
        num_heads: int,
        num_lists: int,
        head_dim: int,
        device: torch.device,
        blocks_per_row: int | None = None,
    ) -> Workspace:
        """Scratch for B = ``batch``, H_q = ``num_heads``, H = ``num_lists`` lists per request; J by Equation (4)."""
        rows, group = batch * num_lists, num_heads // num_lists
        shape = (rows, blocks_per_row or eq4_blocks_per_row(rows), group)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty((batch, num_heads), dtype=torch.float32, device=device),
        )


def require_supported(q: torch.Tensor, kv: PagedKV, pages: RaggedPages) -> None:
    """Raise ``UnsupportedError`` for a device or size that the kernels do not cover."""
    if q.device.type != "cuda" and not INTERPRETED:
        raise UnsupportedError(
            f"attend: needs tensors on a CUDA GPU, got {q.device}; on a CPU use attention.reference(), "
            "or set TRITON_INTERPRET=1 before the import to run the kernels in Triton's interpreter"
        )
    for name, value, limit in (
        ("query heads per list", q.shape[1] // pages.num_lists, MAX_GROUP),
        ("head dimension", kv.head_dim, MAX_HEAD_DIM),
        ("page size", kv.page_size, MAX_PAGE_SIZE),
    ):
        if value > limit:
            raise UnsupportedError(f"attend: {name} {value} is not supported, the limit is {limit}")


def attend(
    q: torch.Tensor,
    kv: PagedKV,
    pages: RaggedPages,
    *,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one decode step over any selector's page lists, on the device, without host work.

    Args:
        q: [B, H_q, D], same dtype as the cache; any batch and head stride.
        kv: the paged cache; page sizes 1 to 128, D up to 256.
        pages: the lists; H = H_kv (shared by a group) up to H = H_q (one each), at most 16 query heads a list.
        softmax_scale: 1/sqrt(D) if None.
        out: [B, H_q, D] to write into; allocated if None.
        workspace: scratch from ``Workspace.allocate``; allocated if None. Pass it to capture a CUDA graph.
        return_lse: also return the LSE [B, H_q] float32, natural log.

    Raises:
        ValueError: arguments that do not fit together.
        UnsupportedError: a device, head dimension, group or page size outside the limits.
    """
    check_attention_arguments(q, kv, pages)
    require_supported(q, kv, pages)
    batch, num_heads, head_dim = q.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        require_tensor("out", out, tuple(q.shape), q.dtype, q.device)
    if workspace is None:
        workspace = Workspace.allocate(batch, num_heads, pages.num_lists, head_dim, q.device)
    rows, blocks_per_row, group, _ = workspace.partials.shape
    if (rows, group) != (pages.num_rows, num_heads // pages.num_lists):
        raise ValueError(f"workspace: made for {rows} rows of {group} heads, got {pages.num_rows} rows")
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    min_chunk_pages = eq4_min_chunk_pages(kv.page_size)
    lengths, last_page_len = pages.lengths.contiguous(), pages.last_page_len.contiguous()
    _attend_kernel[(rows, blocks_per_row)](
        q,
        kv.k,
        kv.v,
        pages.page_ids,
        lengths,
        last_page_len,
        out,
        workspace.lse,
        workspace.partials,
        workspace.partial_lse,
        scale * 1.4426950408889634,
        *q.stride()[:2],
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        *pages.page_ids.stride()[:2],
        *out.stride()[:2],
        NUM_LISTS=pages.num_lists,
        LISTS_PER_KV_HEAD=pages.num_lists // kv.num_kv_heads,
        GROUP=group,
        BLOCK_G=16,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PAGE_SIZE=kv.page_size,
        TILE=64,
        BLOCKS_PER_ROW=blocks_per_row,
        MIN_CHUNK=min_chunk_pages,
        INTERPRETED=INTERPRETED,
        num_warps=4,
        num_stages=3,
    )
    merge.launch(workspace.partials, workspace.partial_lse, lengths, out, workspace.lse, min_chunk_pages)
    return (out, workspace.lse) if return_lse else out
