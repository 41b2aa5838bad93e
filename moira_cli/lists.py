"""Where ragged page lists come from: synthetic lengths, or the lists of a real model's decode steps.

A list source gives, for a batch of B requests with H lists each and P pages a row, the keep mask [B, H, P] bool. The
first and the current (last) page of a row are always kept, so a row of two pages or more keeps at least two.

**Recorded lists** are one .npz file (numpy's zip format, read without pickle), written by ``moira record``:

    meta            UTF-8 JSON as uint8: format, model, geometry, gamma, estimator, page_size, text, command, ...
    document        [N] uint16      document of each decode step
    num_pages       [N] uint16      pages of the context at that step
    kept            [N, L, H, ceil(max_pages / 8)] uint8    bit p (lowest first) = page p is in the list
    counts          [N, L, H] uint16    pages in the list
    oracle_counts   [N, L, H] uint16    size of the oracle set at the same gamma (Equation 1), from exact masses
    covered         [N, L, H] float16   share of the exact attention mass that the list covers
    sample          [M, 3] uint16   (step, layer, KV head) of the rows whose estimated masses are kept
    log_mass        [M, G, max_pages] float16   their estimated log masses, one per query head; -inf past the last page
    checksum        [32] uint8      SHA-256 over the arrays above (name, dtype, shape, bytes), in this order

for N decode steps, L layers and H KV heads of G query heads. ``docs/page_lists.md`` describes the same for readers in
other languages.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from moira_cli.errors import CliError
from moira_cli.records import write_atomically

FORMAT = "moira-page-lists/1"
SHIPPED = Path(__file__).parent / "data" / "smollm2-135m-8k.npz"
ARRAYS = {
    "meta": (np.uint8, 1),
    "document": (np.uint16, 1),
    "num_pages": (np.uint16, 1),
    "kept": (np.uint8, 4),
    "counts": (np.uint16, 3),
    "oracle_counts": (np.uint16, 3),
    "covered": (np.float16, 3),
    "sample": (np.uint16, 2),
    "log_mass": (np.float16, 3),
}
"""Name -> (dtype, number of dimensions), in checksum order."""


def coefficient_of_variation(values: np.ndarray, axis: int | None = None) -> Any:
    """Standard deviation over mean."""
    return values.std(axis) / values.mean(axis)


def forced_pages(pages: int) -> int:
    """Pages that every row of ``pages`` pages keeps: the first and the current one."""
    return min(pages, 2)


def synthetic_counts(rows: int, pages: int, keep: float, cv: float, seed: int) -> np.ndarray:
    """Page counts [rows] int of lognormal spread ``cv`` around ``keep * pages``, clipped to the row's pages.

    The rows are the midpoint quantiles of the lognormal distribution in seeded order, so that a few rows already spread
    as asked for. The total is round(keep * pages * rows) for every cv (or as near as the forced pages allow), so that
    times at different cv compare equal work. Clipping and the missing tails make the measured CV smaller than the
    nominal one.
    """
    low = forced_pages(pages)
    total = int(np.clip(round(keep * pages * rows), low * rows, pages * rows))
    sigma = np.sqrt(np.log1p(cv * cv))
    deviates = np.array([NormalDist().inv_cdf((i + 0.5) / rows) for i in range(rows)])
    weight = np.random.default_rng(seed).permutation(np.exp(sigma * deviates))
    return counts_of_total(weight, pages, total)


def counts_of_total(weight: np.ndarray, pages: int, total: int) -> np.ndarray:
    """Page counts [rows] int in proportion to ``weight`` [rows] > 0, clipped to the row's pages, that sum to ``total``.

    ``total`` must lie between what the forced pages and what whole rows come to.
    """
    low = forced_pages(pages)

    def clipped(scale: float) -> np.ndarray:
        return np.clip(scale * weight, low, pages)

    # The scale whose clipped sum is the total, by bisection; then largest remainders make it exact.
    lo, hi = 0.0, pages / weight.min()
    for _ in range(100):
        middle = (lo + hi) / 2
        lo, hi = (middle, hi) if clipped(middle).sum() < total else (lo, middle)
    exact = clipped(hi)
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def random_keep(counts: np.ndarray, pages: int, seed: int) -> np.ndarray:
    """A keep mask [.., pages] with ``counts`` [..] pages a row: the forced ones, the others at random places."""
    key = np.random.default_rng(seed).random((*counts.shape, pages))
    key[..., 0] = key[..., -1] = -1.0
    rank = key.argsort(-1, kind="stable").argsort(-1, kind="stable")
    return rank < counts[..., None]


@dataclass(frozen=True)
class RecordedLists:
    """The page lists of one recording; arrays as the module docstring says, ``meta`` decoded."""

    meta: dict[str, Any]
    document: np.ndarray
    num_pages: np.ndarray
    kept: np.ndarray
    counts: np.ndarray
    oracle_counts: np.ndarray
    covered: np.ndarray
    sample: np.ndarray
    log_mass: np.ndarray

    @cached_property
    def label(self) -> str:
        """'SmolLM2-135M-Instruct, 8,192 tokens, gamma 0.98'."""
        meta = self.meta
        return f"{meta['model']}, {meta['context_tokens']:,} tokens, gamma {meta['gamma']:g}"

    def keep(self, step: int) -> np.ndarray:
        """Keep mask [L, H, pages] bool of one recorded step."""
        return np.unpackbits(self.kept[step], axis=-1, bitorder="little")[..., : self.num_pages[step]].astype(bool)

    def page_ids(self, step: int, layer: int, head: int) -> np.ndarray:
        """Logical page ids of one recorded list, ascending."""
        return np.flatnonzero(self.keep(step)[layer, head])

    def fractions(self, counts: np.ndarray) -> np.ndarray:
        """Counts [N, L, H] as fractions of the step's pages."""
        return counts / self.num_pages[:, None, None]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the file, without the checksum."""
        meta = np.frombuffer(json.dumps(self.meta, sort_keys=True).encode(), np.uint8)
        return {"meta": meta, **{name: getattr(self, name) for name in ARRAYS if name != "meta"}}

    def save(self, path: Path) -> None:
        """Write the file in one step."""
        arrays = self.arrays()
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays, checksum=checksum(arrays))
        write_atomically(path, buffer.getvalue())


def checksum(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """SHA-256 over name, dtype, shape and bytes of each array, as [32] uint8."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def load_recorded(path: Path) -> RecordedLists:
    """Read a recorded-lists file; refuse a missing, empty, truncated, foreign or damaged one with the reason."""

    def refuse(reason: str) -> CliError:
        return CliError(f"Page lists '{path}': {reason}. Expected a file written by 'moira record' ({FORMAT}).")

    try:
        data = path.read_bytes()
    except OSError as error:
        raise refuse(error.strerror or str(error)) from error
    if not data:
        raise refuse("the file is empty")
    if not data.startswith(b"PK"):
        raise refuse("not an .npz file")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*ARRAYS, "checksum") if name in file.files}
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, KeyError, NotImplementedError) as error:
        raise refuse(f"truncated or damaged ({error})") from error
    except Exception as error:  # zlib.error and struct.error among them: whatever the bytes provoke
        raise refuse(f"damaged ({error})") from error
    missing = [name for name in (*ARRAYS, "checksum") if name not in arrays]
    if missing:
        raise refuse(f"a foreign .npz file without '{missing[0]}'")
    for name, (dtype, dims) in ARRAYS.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != dims:
            raise refuse(f"'{name}' is {arrays[name].dtype} with {arrays[name].ndim} dimensions")
    if not np.array_equal(checksum(arrays), arrays.pop("checksum")):
        raise refuse("the checksum does not match, so the content is damaged")
    meta = json.loads(arrays.pop("meta").tobytes())
    if meta.get("format") != FORMAT:
        raise refuse(f"format '{meta.get('format')}'")
    lists = RecordedLists(meta, **arrays)
    if len(lists.document) == 0:
        raise refuse("it holds no decode step")
    return lists


@dataclass(frozen=True)
class Lists:
    """Page counts of a batch and where they come from; the keep masks are made when asked for.

    Attributes:
        counts: [B, H] int, pages kept.
        pages: P, pages of every row.
        source: 'synthetic', 'one-long', or the label of the recording.
        cv_nominal: the CV asked for; None if none was.
        seed: seed of the places of the pages.
        exact: (recording, steps [B], lists [B, H]) whose page ids are used as recorded; None to place them at random.
    """

    counts: np.ndarray
    pages: int
    source: str
    cv_nominal: float | None
    seed: int
    exact: tuple[RecordedLists, np.ndarray, np.ndarray] | None = None

    def keep(self, variant: int = 0) -> np.ndarray:
        """Keep mask [B, H, P] bool. Variants have the same counts at other places; recorded ids stay as they are."""
        if self.exact is None:
            return random_keep(self.counts, self.pages, self.seed + variant)
        recorded, steps, units = self.exact
        masks = (recorded.keep(step).reshape(-1, self.pages)[unit] for step, unit in zip(steps, units, strict=True))
        return np.stack(list(masks))

    def describe(self) -> dict[str, Any]:
        """What a result records about its lists."""
        digest = hashlib.sha256(self.counts.tobytes() + f"{self.source} {self.seed}".encode()).hexdigest()[:16]
        return {
            "length_source": self.source,
            "cv_nominal": self.cv_nominal,
            "cv_measured": float(coefficient_of_variation(self.counts)),
            "kept_pages": int(self.counts.sum()),
            "kept_fraction": float(self.counts.mean() / self.pages),
            "page_ids": "random" if self.exact is None else "recorded",
            "lists_digest": digest,
        }


def synthetic(batch: int, heads: int, pages: int, keep: float, cv: float, seed: int) -> Lists:
    """Synthetic lists for B = ``batch`` requests, H = ``heads`` lists each, ``pages`` pages a row."""
    counts = synthetic_counts(batch * heads, pages, keep, cv, seed).reshape(batch, heads)
    return Lists(counts, pages, "synthetic", cv, seed)


def one_long(batch: int, heads: int, pages: int, seed: int) -> Lists:
    """One list of every page among lists of a 64th of them (at least the forced pages): worst for a split by rows."""
    counts = np.full((batch, heads), max(forced_pages(pages), round(pages / 64)), dtype=np.int64)
    counts[batch // 2, 0] = pages
    return Lists(counts, pages, "one-long", None, seed)


def from_recorded(recorded: RecordedLists, batch: int, heads: int, pages: int, seed: int) -> Lists:
    """A recording applied to another batch, as the paper's "real" lists are.

    Each request takes one recorded decode step and ``heads`` consecutive (layer, KV head) lists of it; steps and
    starting lists are spread evenly over the recording, in seeded order. Where the row has as many pages as the
    recorded step its page ids are used as they are; otherwise its counts are, as fractions of ``pages``.
    """
    N, L, H = recorded.counts.shape
    rng = np.random.default_rng(seed)
    steps = rng.permutation(np.arange(batch) * N // batch)
    offset = rng.integers(L * H)
    starts = (np.arange(batch) * (L * H) // batch + offset) % (L * H)
    units = (starts[:, None] + np.arange(heads)) % (L * H)
    counts = recorded.counts.reshape(N, L * H)[steps[:, None], units].astype(np.int64)
    if (recorded.num_pages[steps] == pages).all():
        return Lists(counts, pages, recorded.label, None, seed, (recorded, steps, units))
    fractions = counts / recorded.num_pages[steps, None]
    counts = np.clip(np.round(fractions * pages), forced_pages(pages), pages).astype(np.int64)
    return Lists(counts, pages, recorded.label, None, seed)


def profiled_counts(
    recorded: RecordedLists, layers: int, heads: int, pages: int, reads: float, seed: int
) -> np.ndarray:
    """Page counts [layers, heads] int of a model for rows of ``pages`` pages, after a recording, ``reads`` on average.

    Layer l follows the recorded layer at the same relative depth; each of its heads takes the fraction that one of that
    layer's recorded lists kept at one decode step, drawn by ``seed``. Scaling keeps the proportions, except where a row
    would be read more than whole or less than its forced pages.
    """
    N, L, H = recorded.counts.shape
    rng = np.random.default_rng(seed)
    depth = np.arange(layers) * L // layers
    # A layer takes its recorded heads in turn, each at a step of its own.
    head = (np.arange(heads) + rng.integers(H, size=(layers, 1))) % H
    step = rng.integers(N, size=(layers, heads))
    fractions = recorded.counts[step, depth[:, None], head] / recorded.num_pages[step]
    rows = layers * heads
    total = int(np.clip(round(reads * pages * rows), forced_pages(pages) * rows, pages * rows))
    return counts_of_total(fractions.ravel(), pages, total).reshape(layers, heads)


def summarize(recorded: RecordedLists) -> dict[str, dict[str, float]]:
    """The numbers of the paper's Figure 1 for a recording, for the estimated lists and for the oracle sets.

    mean_fraction: pages kept over pages, all steps, layers and heads. The CVs are of the kept fraction: across layers
    (of layer means), across the KV heads of one layer at one step, and across the steps of one (layer, head).
    padded_fraction: what would be read if every head of a layer took as many pages as its longest one.
    fixed_*: reads of budgets that give 90% of the rows all the pages they need, relative to the mean need: one count
    for all rows, one per layer, one per (layer, head).
    """
    result = {}
    for name, counts in (("estimated", recorded.counts), ("oracle", recorded.oracle_counts)):
        fraction = recorded.fractions(counts)
        unit_mean = fraction.mean(0)
        result[name] = {
            "mean_fraction": float(fraction.mean()),
            "min_unit_fraction": float(unit_mean.min()),
            "max_unit_fraction": float(unit_mean.max()),
            "cv_layers": float(coefficient_of_variation(fraction.mean((0, 2)))),
            "cv_heads": float(coefficient_of_variation(fraction, 2).mean()),
            "cv_steps": float(coefficient_of_variation(fraction, 0).mean()),
            "padded_fraction": float(fraction.max(2).mean()),
            "fixed_one": float(np.quantile(fraction, 0.9) / fraction.mean()),
            "fixed_per_layer": float(np.quantile(fraction, 0.9, axis=(0, 2)).mean() / fraction.mean()),
            "fixed_per_head": float(np.quantile(fraction, 0.9, axis=0).mean() / fraction.mean()),
        }
    covered = recorded.covered.astype(np.float64)
    result["estimated"]["mean_covered_mass"] = float(covered.mean())
    result["estimated"]["rows_reaching_gamma"] = float((covered >= recorded.meta["gamma"]).mean())
    return result
