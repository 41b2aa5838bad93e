"""What sparse layers share in one step of the engine: which rows decode, which pages were filled, buffers, counters.

Nothing here depends on vLLM. A step is a batch of requests ("rows") with q_b new tokens each and L_b tokens in all:

- The leading rows with one new token are decode rows and go through the pipeline. That is a rule about shape, not about
  phase: a prefill chunk of one token that vLLM puts among them is attended sparsely too.
- The other rows are prefill rows: dense attention, and the summaries of the pages they fill, which are the pages
  floor((L_b - q_b) / S) to floor(L_b / S) - 1 of each row, whatever the chunks.
- A decode row's own page is summarised by Estimate when its last slot is written.

So every page has its summary from the step that writes its last slot, and no state is kept per request: prefix caching,
preemption and page reuse need nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
import triton
import triton.language as tl

from moira_kernels.checks import UnsupportedError
from moira_kernels.layout import PagedKV
from moira_kernels.pipeline import DecodeLayer
from moira_kernels.vllm_plugin.config import MoiraConfig

PAGE_SIZE = 64
logger = logging.getLogger("vllm.moira")


def leading_decode_rows(query_lens: np.ndarray) -> int:
    """How many rows, from the first on, are decode rows; query_lens is [rows] int.

    Rows with no token are graph padding: they follow the decode rows and count as such in a batch without prefill rows.
    """
    if query_lens.max(initial=0) <= 1:
        return len(query_lens)
    return int(np.argmax(query_lens != 1))


def filled_pages(query_lens: np.ndarray, seq_lens: np.ndarray, first_row: int) -> np.ndarray:
    """[2, n] int64: block-table row and column of every page that rows ``first_row`` and later fill in this step.

    query_lens and seq_lens are [rows] int, the new tokens and all tokens of each row.
    """
    end = seq_lens[first_row:].astype(np.int64)
    begin = (end - query_lens[first_row:]) // PAGE_SIZE
    pages = np.maximum(end // PAGE_SIZE - begin, 0)
    row = np.repeat(np.arange(len(pages)), pages)
    within = np.arange(row.size) - np.repeat(np.cumsum(pages) - pages, pages)
    return np.stack([row + first_row, begin[row] + within])


@triton.jit(do_not_specialize=["batch"])
def _count_kernel(
    lengths_ptr,  # [layers, max_batch, H] int32
    seq_lens_ptr,  # [batch] int32
    slot_mapping_ptr,  # [batch] int64
    totals_ptr,  # [layers, 4] int64
    batch,
    stride_layer,
    NUM_LISTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    sparse_rows = tl.zeros([TILE], tl.int64)
    dense_rows = tl.zeros([TILE], tl.int64)
    read = tl.zeros([TILE], tl.int64)
    total = tl.zeros([TILE], tl.int64)
    for first in range(0, batch, TILE):
        row = first + tl.arange(0, TILE)
        valid = row < batch
        real = valid & (tl.load(slot_mapping_ptr + row, mask=valid, other=-1) >= 0)
        pages = tl.where(real, tl.cdiv(tl.load(seq_lens_ptr + row, mask=valid, other=0), PAGE_SIZE), 0)
        list_ptr = lengths_ptr + layer * stride_layer + row * NUM_LISTS
        sparse = tl.load(list_ptr, mask=valid, other=-1) >= 0
        sparse_rows += (real & sparse).to(tl.int64)
        dense_rows += (real & (sparse == 0)).to(tl.int64)
        total += pages.to(tl.int64) * NUM_LISTS
        for head in range(NUM_LISTS):
            length = tl.load(list_ptr + head, mask=valid, other=0)
            read += tl.where(real, tl.where(sparse, length, pages), 0).to(tl.int64)
            tl.store(list_ptr + head, -1, mask=valid)
    totals = totals_ptr + layer * 4
    tl.store(totals, tl.load(totals) + tl.sum(sparse_rows, 0))
    tl.store(totals + 1, tl.load(totals + 1) + tl.sum(dense_rows, 0))
    tl.store(totals + 2, tl.load(totals + 2) + tl.sum(read, 0))
    tl.store(totals + 3, tl.load(totals + 3) + tl.sum(total, 0))


def count(lengths: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor, totals: torch.Tensor) -> None:
    """Add one step's decode rows to ``totals`` [layers, 4] int64 on the device and mark their lists as counted.

    lengths [layers, max_batch, H] int32 hold what Select wrote in this step, or -1: a row is sparse if there is a list,
    else it was attended densely. seq_lens [batch] int32; slot_mapping [batch] int64, negative for rows that vLLM made
    up (warm-up, capture, graph padding), which are not counted.
    """
    _count_kernel[(lengths.shape[0],)](
        lengths,
        seq_lens,
        slot_mapping,
        totals,
        seq_lens.shape[0],
        lengths.stride(0),
        NUM_LISTS=lengths.shape[2],
        PAGE_SIZE=PAGE_SIZE,
        TILE=128,
        num_warps=4,
    )


def count_reference(
    lengths: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor, totals: torch.Tensor
) -> None:
    """``count`` in PyTorch."""
    batch, lists = seq_lens.shape[0], lengths.shape[2]
    real = slot_mapping[:batch] >= 0
    pages = (seq_lens + PAGE_SIZE - 1) // PAGE_SIZE * real
    step = lengths[:, :batch]
    sparse = (step[..., 0] >= 0) & real
    read = torch.where(sparse, step.sum(-1), pages * lists) * real
    new = (sparse, real & ~sparse, read, (pages * lists).expand_as(read))
    totals += torch.stack([each.sum(-1, dtype=torch.int64) for each in new], dim=-1)
    step.fill_(-1)


class Counters:
    """Decode rows and pages by layer, counted on the device once a step from the lists that Select left there.

    Attributes:
        lengths: [layers, max_batch, H] int32; layer l's Select writes ``lengths[l]``.
    """

    FIELDS = ("sparse_rows", "dense_rows", "pages_read", "pages_total")

    def __init__(self, dense_because: dict[str, str | None], max_batch: int, num_lists: int, device: torch.device):
        self.dense_because = dense_because
        shape = (len(dense_because), max_batch, num_lists)
        self.lengths = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._totals = torch.zeros((len(dense_because), len(self.FIELDS)), dtype=torch.int64, device=device)

    def count(self, seq_lens: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Add the decode rows of this step, after its last layer."""
        launch = count if self._totals.is_cuda else count_reference
        launch(self.lengths, seq_lens, slot_mapping, self._totals)

    def read(self) -> dict[str, dict[str, Any]]:
        """By layer: ``sparse_rows`` and ``dense_rows`` (decode rows), ``pages_read`` and ``pages_total`` (of all rows
        and KV heads) since the start, and ``dense_because`` (None for a sparse layer). vLLM's warm-up may have decoded
        some. Waits for the device.
        """
        rows = self._totals.tolist()
        return {
            name: dict(zip(self.FIELDS, row, strict=True), dense_because=reason)
            for (name, reason), row in zip(self.dense_because.items(), rows, strict=True)
        }


@dataclass(frozen=True)
class Group:
    """Layers with the same cache shape and block table.

    Attributes:
        layers: the sparse ones by name.
        counters: of all of them, dense ones included.
        last: the layer after which a step is over.
        rule: by layer name, the argument of ``DecodeLayer.run`` that chooses pages.
    """

    layers: dict[str, DecodeLayer]
    counters: Counters
    last: str
    rule: dict[str, dict[str, Any]]

    @classmethod
    def allocate(
        cls,
        caches: dict[str, torch.Tensor],
        dense_because: dict[str, str | None],
        num_heads: int,
        block_table: torch.Tensor,
        max_batch: int,
        config: MoiraConfig,
        counts: dict[str, list[int]],
        layer_class: type[DecodeLayer],
    ) -> Group:
        """Take the memory of a group, once its size is known to fit, and print it.

        Args:
            caches: by layer name in the order of the model, [num_pages, H_kv, 64, 2D].
            dense_because: by layer name in the same order, why it is dense; None for a sparse layer.
            num_heads: H_q of this rank.
            block_table: of any step; its width is the most pages a request can have.
            max_batch: most requests of a step.
            config: the settings.
            counts: pages per KV head of this rank by layer name, for the policies that fix them.
            layer_class: ``DecodeLayer``, or ``ReferenceLayer`` on a CPU.
        """
        device = block_table.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("moira: the first step came during graph capture; buffers must be taken before")
        sparse = [name for name, reason in dense_because.items() if reason is None]
        seq_lens = block_table.new_zeros(block_table.shape[0])
        kv = {name: PagedKV.from_fused(caches[name], block_table, seq_lens) for name in sparse}
        for name in sparse:
            if kv[name].page_size != PAGE_SIZE:
                raise UnsupportedError(f"moira: {name} has pages of {kv[name].page_size} tokens, expected {PAGE_SIZE}")
        _require_memory(list(kv.values()), num_heads, max_batch, config.partition)
        counters = Counters(dense_because, max_batch, kv[sparse[0]].num_kv_heads, device)
        lengths = dict(zip(dense_because, counters.lengths, strict=True))
        # Over one page of the cache, since only its buffers are wanted and not its summaries.
        one_page = PagedKV.from_fused(caches[sparse[0]][:1], block_table, seq_lens)
        shared = layer_class.allocate(one_page, num_heads, batch=max_batch, partition=config.partition)
        layers = {name: shared.sibling(kv[name], lengths[name]) for name in sparse}
        rule: dict[str, dict[str, Any]] = {name: {"gamma": config.gamma} for name in sparse}
        for name in counts.keys() & set(sparse):
            rule[name] = {"counts": torch.tensor(counts[name], dtype=torch.int32, device=device)}
        group = cls(layers, counters, list(dense_because)[-1], rule)
        if device.type == "cuda":
            group._compile(caches[sparse[0]], num_heads, block_table, max_batch)
        return group

    def _compile(self, cache: torch.Tensor, num_heads: int, block_table: torch.Tensor, max_batch: int) -> None:
        """Run an empty step of every size that needs kernels of its own, so that none is compiled while serving."""
        name, layer = next(iter(self.layers.items()))
        sizes = {layer.compiled_for(size): size for size in range(1, max_batch + 1)}.values()
        q = cache.new_zeros((max_batch, num_heads, cache.shape[3] // 2))
        table = block_table.new_zeros((max_batch, block_table.stride(0)))[:, : block_table.shape[1]]
        seq_lens = block_table.new_zeros(max_batch)
        slots = torch.full((max_batch,), -1, dtype=torch.int64, device=q.device)
        for size in sizes:
            self.decode(name, q[:size], cache, table, seq_lens, 1.0, torch.empty_like(q[:size]))
            self.counters.count(seq_lens[:size], slots)
        # Page 0 is vLLM's null page, which no request reads.
        self.prefill(name, cache, table, seq_lens, seq_lens[:1])

    def set_counts(self, name: str, counts: list[int]) -> None:
        """Other counts [H] for a layer whose policy fixes them, from the next step on, captured graphs included."""
        rule = self.rule[name]["counts"]
        rule.copy_(torch.tensor(counts, dtype=rule.dtype))

    def prefill(self, name: str, cache: torch.Tensor, block_table, seq_lens, page_ids: torch.Tensor) -> None:
        """Summarise the pages ``page_ids`` [n] int32 (physical ids) that this step's prefill rows have filled."""
        self.layers[name].prefill(PagedKV.from_fused(cache, block_table, seq_lens), page_ids)

    def decode(
        self, name: str, q: torch.Tensor, cache: torch.Tensor, block_table, seq_lens, scale: float, out: torch.Tensor
    ) -> None:
        """Attend to q [rows, H_q, D] with the first rows of the batch; ``out`` has q's shape."""
        rows = q.shape[0]
        kv = PagedKV.from_fused(cache, block_table[:rows], seq_lens[:rows])
        self.layers[name].run(q, kv, softmax_scale=scale, out=out, **self.rule[name])


def _require_memory(layers: list[PagedKV], num_heads: int, max_batch: int, partition: str) -> None:
    """Print what the buffers will take, or raise ``UnsupportedError`` if that is more than is free."""
    device = layers[0].k.device
    # Sizes from tensors without storage; the partials of the balanced partition, a few MB, are counted for one row.
    meta = [PagedKV(*(t.to("meta") for t in (kv.k, kv.v, kv.block_table, kv.seq_lens))) for kv in layers]
    step = DecodeLayer.allocate(meta[0], num_heads, batch=max_batch, partition=partition)
    of_one = step.summaries.mean.nbytes + step.summaries.variance.nbytes
    summaries, buffers = of_one * len(layers), step.nbytes - of_one
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    pages, width = layers[0].k.shape[0], layers[0].max_pages
    message = (
        f"moira: page summaries of {len(layers)} layers x {pages:,} pages take {summaries / 2**30:.3f} GiB, buffers "
        f"for {max_batch:,} requests of up to {width:,} pages {buffers / 2**30:.3f} GiB; "
        f"{free / 2**30:.3f} GiB of {device} are free"
    )
    if summaries + buffers > free:
        raise UnsupportedError(f"{message}. Lower gpu_memory_utilization, max_num_seqs or max_model_len.")
    logger.info(message)
