"""How the pages of ragged rows are shared among thread blocks: two partitions as pure functions of the row lengths.

``eq4`` is the paper's (Equation 4 and Algorithm 2): J thread blocks per row, each taking one chunk of c_b pages,

    J = max(N_J, ceil(N_T / rows)),        c_b = max(C, ceil(n_b / J)),

so a block whose chunk lies past the row's end exits at once. ``balanced`` gives each of a fixed number of thread
blocks an equal contiguous slice of all rows laid end to end, whatever the rows' lengths; only the first and the last
row of a slice can be cut.

Both need nothing but the lengths: no GPU and no plan. The kernels compute the same cut on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_CHUNK_PAGES = 24
"""C: the paper's smallest chunk in 64-token pages, so that a short row needs one thread block."""
MIN_BLOCKS_PER_ROW = 32
"""N_J: the paper's fewest thread blocks per row."""
MIN_BLOCKS = 4096
"""N_T: the paper's fewest thread blocks in the grid, so that a few long rows still fill the GPU."""


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b) for integers, b > 0."""
    return -(-a // b)


def eq4_blocks_per_row(
    num_rows: int, min_blocks_per_row: int = MIN_BLOCKS_PER_ROW, min_blocks: int = MIN_BLOCKS
) -> int:
    """J of Equation (4): a function of the number of rows alone, so it can be fixed when a graph is captured."""
    if num_rows < 1:
        raise ValueError(f"num_rows: expected at least 1, got {num_rows}")
    return max(min_blocks_per_row, ceil_div(min_blocks, num_rows))


def eq4_min_chunk_pages(page_size: int) -> int:
    """C in pages of ``page_size`` tokens: the paper's 24 pages of 64 tokens, the same tokens at any page size."""
    return ceil_div(MIN_CHUNK_PAGES * 64, page_size)


def eq4_chunk_pages(length: int, blocks_per_row: int, min_chunk_pages: int = MIN_CHUNK_PAGES) -> int:
    """c_b of Equation (4): pages per chunk of a row that lists ``length`` pages."""
    return max(min_chunk_pages, ceil_div(length, blocks_per_row))


@dataclass(frozen=True)
class Partition:
    """Which pages each thread block takes. Parallel arrays with one entry per (thread block, row) piece of work.

    Attributes:
        num_blocks: thread blocks launched, idle ones included.
        block: [pieces] int, the thread block.
        row: [pieces] int, the row.
        start, stop: [pieces], half-open range of positions in the row's page list (int, or float: parts of pages).
    """

    num_blocks: int
    block: np.ndarray
    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def pages_per_block(self) -> np.ndarray:
        """[num_blocks] float, pages that each thread block reads; 0 for an idle one."""
        return np.bincount(self.block, weights=self.stop - self.start, minlength=self.num_blocks)

    def chunks_per_row(self, num_rows: int) -> np.ndarray:
        """[num_rows] int, thread blocks that share each row; more than one means the row needs a merge."""
        return np.bincount(self.row, minlength=num_rows)

    def report(self) -> dict[str, Any]:
        """What the thread blocks get.

        blocks, idle: launched, and without work. min, mean, max, max_over_mean: pages of a busy one. quantiles: pages
        of the busy ones, fewest first, at every twentieth of them.
        """
        pages = self.pages_per_block()
        busy = pages[pages > 0]
        some = busy if busy.size else np.zeros(1)
        return {
            "blocks": self.num_blocks,
            "idle": int(self.num_blocks - busy.size),
            "min": float(some.min()),
            "mean": float(some.mean()),
            "max": float(some.max()),
            "max_over_mean": float(busy.max() / busy.mean()) if busy.size else 0.0,
            "quantiles": np.quantile(some, np.linspace(0, 1, 21)).tolist(),
        }


def _row_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if array.size == 0 or array.min() < 0:
        raise ValueError("lengths: expected at least one row and no negative length")
    return array


def eq4(
    lengths: Sequence[int] | np.ndarray,
    blocks_per_row: int | None = None,
    min_chunk_pages: int = MIN_CHUNK_PAGES,
) -> Partition:
    """The paper's partition of rows of ``lengths`` pages. Thread block (b, j) is numbered b * J + j.

    Rows of 8, 3, 5 and 2 pages with J = 4 and C = 2 (the paper's Figure 3) use 4, 2, 3 and 1 thread blocks:

    >>> eq4([8, 3, 5, 2], blocks_per_row=4, min_chunk_pages=2).chunks_per_row(4)
    array([4, 2, 3, 1])
    """
    n = _row_lengths(lengths)
    J = eq4_blocks_per_row(n.size) if blocks_per_row is None else blocks_per_row
    chunk = np.maximum(min_chunk_pages, -(-n // J))
    chunks = -(-n // chunk)
    row = np.repeat(np.arange(n.size), chunks)
    j = np.arange(row.size) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    start = j * chunk[row]
    return Partition(n.size * J, row * J + j, row, start, np.minimum(start + chunk[row], n[row]))


def balanced(
    lengths: Sequence[int] | np.ndarray, num_blocks: int, page_size: int = 64, tile_tokens: int = 64
) -> Partition:
    """Equal contiguous slices of all tiles of ``tile_tokens`` tokens, rows laid end to end.

    Of T tiles, each of N thread blocks takes floor(T / N), and the first T mod N one more. A row has
    max(1, ceil(pages * page_size / tile_tokens)) tiles: an empty row counts one, so that some thread block writes its
    zeros. Positions are pages, and fractions of them where a tile is less than a page.

    >>> balanced([8, 3, 5, 2], num_blocks=6).pages_per_block()
    array([3., 3., 3., 3., 3., 3.])
    """
    pages = _row_lengths(lengths)
    if num_blocks < 1:
        raise ValueError(f"num_blocks: expected at least 1, got {num_blocks}")
    n = np.maximum(-(-pages * page_size // tile_tokens), 1)
    row_end = np.cumsum(n)
    size, extra = divmod(int(row_end[-1]), num_blocks)
    block_index = np.arange(num_blocks + 1)
    cuts = block_index * size + np.minimum(block_index, extra)
    # Every slice border and every row border starts a new piece.
    borders = np.unique(np.concatenate([cuts, row_end]))
    start, stop = borders[:-1], borders[1:]
    row = np.searchsorted(row_end, start, side="right")
    block = np.searchsorted(cuts, start, side="right") - 1
    row_start = (row_end - n)[row]
    tiles_per_page = page_size / tile_tokens
    stop_page = np.minimum((stop - row_start) / tiles_per_page, pages[row])
    return Partition(num_blocks, block, row, (start - row_start) / tiles_per_page, stop_page)
