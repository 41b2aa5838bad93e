"""Tables on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from moira_cli.lists import RecordedLists


def new_table(*columns: str, title: str | None = None, left: int = 1) -> Table:
    """A plain table; the first ``left`` columns are left-justified, the others are numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=number < left)
    return table


def print_recording(path: Path, recorded: RecordedLists, console: Console | None = None) -> None:
    """What a recording holds, and the figures of the paper's Figure 1 for it."""
    from moira_cli.lists import summarize

    console = console or Console()
    meta = recorded.meta
    N, L, H = recorded.counts.shape
    console.print(
        f"{path}: {recorded.label}, {N} decode steps of {meta['documents']} documents x {L} layers x {H} KV heads, "
        f"{meta['page_size']}-token pages, text: {meta['text']}" + ("" if meta["complete"] else " (not complete)"),
        highlight=False,
    )
    summary = summarize(recorded)
    table = new_table("", "estimated", "oracle")
    for key, label in FIGURE_1.items():
        table.add_row(label, *(_fraction(summary[name].get(key)) for name in ("estimated", "oracle")))
    console.print(table)


FIGURE_1 = {
    "mean_fraction": "pages kept / pages, mean",
    "min_unit_fraction": "  lowest (layer, KV head)",
    "max_unit_fraction": "  highest (layer, KV head)",
    "padded_fraction": "  if all heads of a layer took its longest list",
    "cv_layers": "CV across layers",
    "cv_heads": "CV across the KV heads of one layer and step",
    "cv_steps": "CV across the steps of one (layer, KV head)",
    "mean_covered_mass": "exact mass covered, mean",
    "rows_reaching_gamma": "rows whose exact mass reaches gamma",
}


def _fraction(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"
