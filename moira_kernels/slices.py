"""The balanced partition on the device: which tiles of which rows a thread block takes.

All tiles of all rows stand end to end, and each of N thread blocks takes an equal slice of them
(``moira_kernels.partition.balanced`` is the same on the host). Attend and Merge work their slice out from the lengths
alone, so nothing is handed from one to the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_ROWS_AT_ONCE = 4096


@triton.jit
def slice_of(block, total, blocks):
    """[start, stop) of a thread block when ``total`` units are shared evenly; the first total % blocks get one more."""
    size = total // blocks
    extra = total % blocks
    start = block * size + tl.minimum(block, extra)
    return start, start + size + (block < extra).to(tl.int32)


@triton.jit
def block_of(unit, total, blocks):
    """The thread block whose slice holds ``unit``: the inverse of ``slice_of``."""
    size = total // blocks
    extra = total % blocks
    in_larger = extra * (size + 1)
    return tl.where(unit < in_larger, unit // (size + 1), extra + (unit - in_larger) // tl.maximum(size, 1))


@triton.jit
def tiles_of(length, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Tiles of a row that lists ``length`` pages. An empty row counts one, so that some thread block writes it."""
    return tl.maximum(tl.cdiv(length * PAGE_SIZE, TILE), 1)


@triton.jit
def _tiles_at(lengths_ptr, first, num_rows, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS] tiles of rows first .. first + ROWS - 1, 0 past the last."""
    row = first + tl.arange(0, ROWS)
    length = tl.load(lengths_ptr + row, mask=row < num_rows, other=0)
    return tl.where(row < num_rows, tiles_of(length, PAGE_SIZE, TILE), 0)


@triton.jit
def slice_and_row(
    lengths_ptr,
    num_rows,
    block,
    blocks,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # rows whose lengths are added up at once
    ONE_PASS: tl.constexpr,  # num_rows <= ROWS
    LAST: tl.constexpr,
):
    """(total tiles, start, stop, row, first tile of that row) for the slice [start, stop) of a thread block.

    The row is that of the slice's first tile, or of its last if LAST.
    """
    tiles = _tiles_at(lengths_ptr, 0, num_rows, PAGE_SIZE, TILE, ROWS)
    total = tl.sum(tiles, 0)
    if not ONE_PASS:
        for first in range(ROWS, num_rows, ROWS):
            total += tl.sum(_tiles_at(lengths_ptr, first, num_rows, PAGE_SIZE, TILE, ROWS), 0)
    start, stop = slice_of(block, total, blocks)
    wanted = tl.maximum(stop - 1, 0) if LAST else start
    before = tl.cumsum(tiles, 0) <= wanted
    row = tl.sum((before & (tiles > 0)).to(tl.int32), 0)
    row_begin = tl.sum(tl.where(before, tiles, 0), 0)
    if not ONE_PASS:
        passed = tl.sum(tiles, 0)
        for first in range(ROWS, num_rows, ROWS):
            more = _tiles_at(lengths_ptr, first, num_rows, PAGE_SIZE, TILE, ROWS)
            before = passed + tl.cumsum(more, 0) <= wanted
            row += tl.sum((before & (more > 0)).to(tl.int32), 0)
            row_begin += tl.sum(tl.where(before, more, 0), 0)
            passed += tl.sum(more, 0)
    return total, start, stop, row, row_begin


def rows_at_once(num_rows: int) -> int:
    """ROWS for a launch over ``num_rows`` rows."""
    return min(MAX_ROWS_AT_ONCE, triton.next_power_of_2(num_rows))
