import numpy as np
import pytest

from moira_kernels import partition


def test_worked_example_of_the_paper():
    cut = partition.eq4([8, 3, 5, 2], blocks_per_row=4, min_chunk_pages=2)
    assert cut.chunks_per_row(4).tolist() == [4, 2, 3, 1]
    report = cut.report()
    assert (report["quantiles"][0], report["quantiles"][-1], len(report["quantiles"])) == (1, 2, 21)
    assert {name: report[name] for name in report if name != "quantiles"} == {
        "blocks": 16,
        "idle": 6,
        "min": 1,
        "mean": 1.8,
        "max": 2,
        "max_over_mean": pytest.approx(2 / 1.8),
    }


@pytest.mark.parametrize(("rows", "expected"), [(1, 4096), (32, 128), (64, 64), (100, 41), (128, 32), (4096, 32)])
def test_blocks_per_row(rows, expected):
    assert partition.eq4_blocks_per_row(rows) == expected


@pytest.mark.parametrize(("length", "expected"), [(0, 24), (1, 24), (768, 24), (769, 25), (1540, 49)])
def test_chunk_pages(length, expected):
    assert partition.eq4_chunk_pages(length, 32) == expected


def random_lengths(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 3000, rng.integers(1, 40)) * rng.integers(0, 2)


def pages_taken(cut, lengths):
    """(row, position) of every page that some thread block takes, with repeats."""
    pieces = zip(cut.row, cut.start, cut.stop, strict=True)
    taken = [(row, page) for row, start, stop in pieces for page in range(int(start), int(stop))]
    return sorted(taken)


@pytest.mark.parametrize("seed", range(8))
def test_every_page_is_taken_once(seed):
    lengths = random_lengths(seed)
    everything = [(row, page) for row, n in enumerate(lengths) for page in range(n)]
    assert pages_taken(partition.eq4(lengths), lengths) == everything
    assert pages_taken(partition.balanced(lengths, 132 * 3), lengths) == everything


@pytest.mark.parametrize("seed", range(8))
def test_balanced_differs_by_one_page_at_most(seed):
    lengths = np.maximum(random_lengths(seed), 1)
    for tile in (32, 64):
        pages = partition.balanced(lengths, 132, 64, tile).pages_per_block()
        assert len(pages) == 132
        assert pages.sum() == lengths.sum()
        assert pages.max() - pages.min() <= tile / 64


def test_balanced_cuts_only_the_first_and_the_last_row_of_a_slice():
    lengths = np.array([5, 1, 1, 1, 9, 2])
    cut = partition.balanced(lengths, 4)
    for block in range(4):
        inner = np.flatnonzero(cut.block == block)[1:-1]
        assert (cut.start[inner] == 0).all()
        assert (cut.stop[inner] == lengths[cut.row[inner]]).all()


def test_one_straggler_row_m12():
    straggler, even = [5000] + [200] * 13, [543] * 14
    assert partition.balanced(straggler, 396).report()["max"] == 20
    assert partition.eq4(straggler).report()["max"] <= 2 * partition.eq4(even).report()["max"]
    assert partition.eq4([16384], blocks_per_row=partition.eq4_blocks_per_row(1)).chunks_per_row(1)[0] > 132


def test_empty_rows_leave_every_block_idle():
    assert partition.eq4([0, 0]).report()["idle"] == partition.eq4([0, 0]).num_blocks
    assert partition.balanced([0, 0], 7).pages_per_block().tolist() == [0] * 7
    assert partition.balanced([0, 0], 7).chunks_per_row(2).tolist() == [1, 1]


def test_small_pages_are_counted_in_tiles():
    cut = partition.balanced([100, 3], 2, page_size=16, tile_tokens=32)
    assert cut.pages_per_block().tolist() == [52, 51]


def test_min_chunk_keeps_its_tokens_at_other_page_sizes():
    assert [partition.eq4_min_chunk_pages(size) for size in (1, 16, 64, 128)] == [1536, 96, 24, 12]


@pytest.mark.parametrize("lengths", [[], [3, -1]])
def test_bad_lengths(lengths):
    with pytest.raises(ValueError, match="lengths"):
        partition.eq4(lengths)
