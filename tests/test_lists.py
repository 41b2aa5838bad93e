import numpy as np
import pytest

from moira_cli import lists
from moira_cli.errors import CliError
from moira_cli.lists import SHIPPED, RecordedLists, load_recorded


@pytest.mark.parametrize(("rows", "pages"), [(256, 128), (128, 512), (32, 2048), (3, 10), (1, 5)])
def test_total_is_the_same_for_every_cv(rows, pages):
    totals = set()
    for cv in (0, 0.4, 1.0, 1.2, 3.0):
        counts = lists.synthetic_counts(rows, pages, 0.22, cv, seed=0)
        assert counts.min() >= 2
        assert counts.max() <= pages
        totals.add(int(counts.sum()))
    assert totals == {max(round(0.22 * rows * pages), 2 * rows)}


def test_spread_follows_the_cv():
    measured = [
        lists.coefficient_of_variation(lists.synthetic_counts(1024, 2048, 0.22, cv, seed=0))
        for cv in (0, 0.4, 0.8, 1.2)
    ]
    assert measured[0] < 0.01
    assert measured == sorted(measured)
    assert measured[1] == pytest.approx(0.4, rel=0.1)
    for rows in (32, 128, 1024):
        assert 0.75 < lists.coefficient_of_variation(lists.synthetic_counts(rows, 512, 0.22, 1.0, seed=0)) < 0.95


def test_seeds():
    same = [lists.synthetic_counts(64, 100, 0.3, 1.0, seed=s).tolist() for s in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


@pytest.mark.parametrize("pages", [1, 2, 3, 128])
def test_random_places(pages):
    counts = np.full((2, 3), lists.forced_pages(pages))
    counts[0, 0] = pages
    keep = lists.random_keep(counts, pages, seed=3)
    assert (keep.sum(-1) == counts).all()
    assert keep[..., 0].all()
    assert keep[..., -1].all()


def test_shipped_recording_is_small_real_and_reproducible_by_its_metadata():
    assert SHIPPED.stat().st_size < 2**20
    recorded = load_recorded(SHIPPED)
    meta = recorded.meta
    assert meta["complete"]
    assert meta["command"].startswith("moira record ")
    assert recorded.counts.shape == (meta["documents"] * meta["steps"], meta["layers"], meta["geometry"][1])
    assert (np.bitwise_count(recorded.kept).sum(-1) == recorded.counts).all()
    assert len(recorded.sample) >= 64
    assert len(np.unique(recorded.sample[:, 1:], axis=0)) == 64
    assert recorded.log_mass.shape[1:] == (meta["geometry"][0] // meta["geometry"][1], 128)
    summary = lists.summarize(recorded)
    assert 0.05 < summary["oracle"]["mean_fraction"] <= summary["estimated"]["mean_fraction"] < 0.9
    for step in (0, len(recorded.counts) - 1):
        keep = recorded.keep(step)
        assert keep.shape[-1] == recorded.num_pages[step]
        assert keep[..., 0].all()
        assert keep[..., -1].all()
        assert recorded.page_ids(step, 3, 1).tolist() == np.flatnonzero(keep[3, 1]).tolist()


def test_recorded_ids_are_used_where_the_context_is_the_same():
    recorded = load_recorded(SHIPPED)
    batch = lists.from_recorded(recorded, 4, 8, int(recorded.num_pages[0]), seed=0)
    assert batch.exact is not None
    assert (batch.keep().sum(-1) == batch.counts).all()
    flat = {recorded.keep(step).reshape(-1, 128)[unit].tobytes() for step in range(256) for unit in range(90)}
    assert all(batch.keep()[b, h].tobytes() in flat for b in range(4) for h in range(8))
    assert (batch.keep(5) == batch.keep()).all()


def test_recorded_counts_are_applied_as_fractions_of_another_context():
    recorded = load_recorded(SHIPPED)
    fraction = lists.summarize(recorded)["estimated"]["mean_fraction"]
    for batch, pages in ((16, 512), (4, 2048), (32, 16)):
        scaled = lists.from_recorded(recorded, batch, 8, pages, seed=0)
        assert scaled.exact is None
        assert scaled.keep().shape == (batch, 8, pages)
        assert scaled.keep().mean() == pytest.approx(fraction, abs=0.08)
        assert (scaled.keep(9).sum(-1) == scaled.counts).all()
        assert (scaled.keep(9) != scaled.keep()).any()
    assert lists.from_recorded(recorded, 2, 8, 1, seed=0).keep().all()


def small_recording():
    keep = np.zeros((2, 1, 2, 10), bool)
    keep[..., [0, 3, 9]] = True
    counts = keep.sum(-1).astype(np.uint16)
    meta = {"format": lists.FORMAT, "model": "m", "context_tokens": 640, "gamma": 0.9, "page_size": 64}
    packed = np.packbits(keep, axis=-1, bitorder="little")
    ten = np.full(2, 10, np.uint16)
    covered, sample = counts.astype(np.float16), np.array([[0, 0, 1]], np.uint16)
    log_mass = np.arange(20, dtype=np.float16).reshape(1, 2, 10)
    document = np.arange(2, dtype=np.uint16)
    return RecordedLists(meta, document, ten, packed, counts, counts, covered, sample, log_mass)


def test_file_round_trip(tmp_path):
    recorded = small_recording()
    recorded.save(tmp_path / "a.npz")
    again = load_recorded(tmp_path / "a.npz")
    assert again.meta == recorded.meta
    assert (again.keep(1) == recorded.keep(1)).all()
    assert list(tmp_path.iterdir()) == [tmp_path / "a.npz"]


def damage(path, how):
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "text":
        path.write_text("hello")
    elif how == "flipped":
        middle = len(data) // 3
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :])
    elif how == "foreign":
        np.savez(path, weights=np.zeros(3))
    elif how == "edited":
        with np.load(path) as file:
            arrays = dict(file)
        arrays["counts"] = arrays["counts"] + np.uint16(1)
        np.savez_compressed(path, **arrays)
    elif how == "newer":
        recorded = small_recording()
        recorded.meta["format"] = "moira-page-lists/9"
        recorded.save(path)
    elif how == "no steps":
        recorded = small_recording()
        arrays = {name: getattr(recorded, name)[:0] for name in lists.ARRAYS if name != "meta"}
        RecordedLists(recorded.meta, **arrays).save(path)
    elif how == "folder":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("missing", "No such file"),
        ("empty", "the file is empty"),
        ("truncated", "truncated or damaged"),
        ("text", "not an .npz file"),
        ("flipped", "damaged"),
        ("foreign", "a foreign .npz file without 'meta'"),
        ("edited", "checksum does not match"),
        ("newer", "format 'moira-page-lists/9'"),
        ("no steps", "no decode step"),
        ("folder", "Is a directory"),
    ],
)
def test_bad_files_are_refused_with_the_reason(tmp_path, how, reason):
    path = tmp_path / "lists.npz"
    small_recording().save(path)
    damage(path, how)
    with pytest.raises(CliError, match=reason) as error:
        load_recorded(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_every_flipped_byte_is_refused(tmp_path):
    """No byte of the file's data can change unnoticed: refused, or (in zip fields nobody reads) the same content."""
    path = tmp_path / "lists.npz"
    small_recording().save(path)
    data, want = path.read_bytes(), small_recording()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        try:
            got = load_recorded(path)
        except CliError:
            continue
        assert got.meta == want.meta
        assert (got.kept == want.kept).all()


def test_one_long_list_among_short_ones():
    made = lists.one_long(8, 8, 2048, 0)
    assert sorted(set(made.counts.flatten().tolist())) == [32, 2048]
    assert (made.counts == 2048).sum() == 1
    assert (made.keep().sum(-1) == made.counts).all()
    assert lists.one_long(1, 2, 1, 0).counts.tolist() == [[1, 1]]
