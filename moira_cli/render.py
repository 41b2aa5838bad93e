"""Tables on stdout."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moira_cli.compare import is_e2e
from moira_cli.records import plan_us
from moira_cli.stages import STAGES, UNCLASSIFIED

if TYPE_CHECKING:
    from moira_cli.lists import RecordedLists


MIN_WIDTH = 124
"""Columns that the widest table needs: in a narrower terminal lines wrap rather than lose digits."""


def new_console(to_stderr: bool = False) -> Console:
    """A console at least MIN_WIDTH wide that does not colour numbers."""
    console = Console(stderr=to_stderr, highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    return console


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """One line a row, in left-justified columns that are never cut; rows may have fewer cells than the first."""
    width = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]
    return ["  ".join(text.ljust(w) for text, w in zip(row, width, strict=False)).rstrip() for row in rows]


def new_table(*columns: str, title: str | None = None, left: int = 1) -> Table:
    """A plain table; the first ``left`` columns are left-justified, the others are numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def print_recording(path: Path, recorded: RecordedLists) -> None:
    """What a recording holds, and the figures of the paper's Figure 1 for it."""
    from moira_cli.lists import summarize

    console = new_console()
    meta = recorded.meta
    N, L, H = recorded.counts.shape
    console.print(
        f"{path}: {recorded.label}, {N} decode steps of {meta['documents']} documents x {L} layers x {H} KV heads, "
        f"{meta['page_size']}-token pages, text: {meta['text']}" + ("" if meta["complete"] else " (not complete)"),
        markup=False,
    )
    summary = summarize(recorded)
    table = new_table("", "estimated", "oracle")
    for key, label in FIGURE_1.items():
        table.add_row(label, *(_fraction(summary[name].get(key)) for name in ("estimated", "oracle")))
    console.print(table)
    # Figure 1a by layer: the mean over steps and heads, and the least and the most that a head needs.
    by_layer = new_table("layer", "estimated", "heads", "oracle", "heads")
    means = [recorded.fractions(counts).mean(0) for counts in (recorded.counts, recorded.oracle_counts)]
    for layer in range(L):
        heads = (mean[layer] for mean in means)
        cells = ((f"{h.mean():.3f}", f"{h.min():.3f}-{h.max():.3f}") for h in heads)
        by_layer.add_row(str(layer), *(text for pair in cells for text in pair))
    console.print(by_layer)


FIGURE_1 = {
    "mean_fraction": "pages kept / pages, mean",
    "min_unit_fraction": "  lowest (layer, KV head)",
    "max_unit_fraction": "  highest (layer, KV head)",
    "padded_fraction": "  if all heads of a layer took its longest list",
    "fixed_one": "fixed budget for 90% of the rows / mean need: one count",
    "fixed_per_layer": "  one count per layer",
    "fixed_per_head": "  one count per (layer, KV head)",
    "cv_layers": "CV across layers",
    "cv_heads": "CV across the KV heads of one layer and step",
    "cv_steps": "CV across the steps of one (layer, KV head)",
    "mean_covered_mass": "exact mass covered, mean",
    "rows_reaching_gamma": "rows whose exact mass reaches gamma",
}


def _fraction(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_run(document: dict[str, Any], to_stderr: bool = False, ranked: bool = False) -> None:
    """The table of a run: one block per point, one line per arm; the fastest by total time is marked.

    Ranked, arms stand in order of total time and ratios are to the fastest unless an arm is named.
    """
    console = new_console(to_stderr)
    _print_device(console, document["env"])
    clock = "kernel" if document["env"]["device"] == "cuda" else "cpu"
    for cells in _by_point(document["cells"]):
        _print_point(console, cells[0])
        if ranked:
            cells = sorted(cells, key=lambda c: c["timing"]["total_us"] if c["status"] == "ok" else float("inf"))
        console.print(_arms_table(cells, clock, document["config_resolved"]["relative_to"]))
    ran = {cell["arm"]: cell["implementation"] for cell in document["cells"] if cell.get("implementation")}
    if ran:
        console.print("\nran on: " + "; ".join(f"{arm}: {what}" for arm, what in ran.items()), markup=False)


def _print_device(console: Console, env: dict[str, Any]) -> None:
    versions = env["libraries"]
    if env["device"] == "cuda":
        device = f"{env['gpu']['name']}, driver {env['gpu']['driver']}"
    else:
        device = f"device: cpu ({env['cpu']}, {env['cpu_threads']} threads) - PyTorch on the CPU, no kernel time"
    console.print(f"{device}, torch {versions['torch']}, triton {versions['triton']}")


def _print_point(console: Console, cell: dict[str, Any]) -> None:
    shape = cell["shape"]
    if cell.get("kind") == "e2e":
        console.print(
            f"\n[bold]{shape['alias']}[/bold]  {shape['batch']} requests of {shape['context_tokens']:,} tokens, "
            f"{cell['kv_layout']}; {escape(cell['model'])}, {cell['weights']} weights"
        )
        return
    nominal = "" if cell["cv_nominal"] is None else f"{cell['cv_nominal']:g} -> "
    console.print(
        f"\n[bold]{shape['alias']}[/bold]  {shape['rows']} rows, {shape['pages_per_row']} pages of "
        f"{shape['page_size']} tokens, {cell['kv_layout']}; lists: {escape(cell['length_source'])}, CV {nominal}"
        f"{cell['cv_measured']:.2f}, kept {cell['kept_fraction']:.1%} ({cell['kept_pages']:,} pages); "
        f"{_l2(cell['l2_policy'])}"
    )


def _l2(policy: str) -> str:
    return {"cold": "L2 cold", "warm": "L2 warm", "uncontrolled": "caches not controlled"}[policy]


def _by_point(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    blocks: dict[tuple, list] = {}
    for cell in cells:
        key = (cell["shape"]["alias"], cell["kv_layout"], cell.get("lists_digest"), cell["cv_nominal"])
        blocks.setdefault(key, []).append(cell)
    return list(blocks.values())


def _arms_table(cells: list[dict[str, Any]], clock: str, relative_to: str | None) -> Table:
    ok = [cell for cell in cells if cell["status"] == "ok"]
    fastest = min(ok, key=lambda cell: cell["timing"]["total_us"], default=None)
    base = {}
    for cell in ok:
        if relative_to is None or cell["arm"] == relative_to:
            base.setdefault(cell["mode"], cell["timing"]["total_us"])
    modes = len({cell["mode"] for cell in cells}) > 1
    table = new_table(
        "arm",
        f"{clock} us",
        "+-95%",
        "plan us",
        "total us",
        "x",
        "TB/s" if clock == "kernel" else "GB/s",
        "limit",
        "moved",
        "max err",
        "flags",
    )
    for cell in cells:
        name = f"{cell['arm']} ({cell['mode']})" if modes else cell["arm"]
        if cell["status"] != "ok":
            table.add_row(name, cell["status"])
            continue
        t, work, check = cell["timing"], cell["work"], cell["check"]
        time = t[f"{clock}_us"]
        low, high = time["ci95"]
        plan = plan_us(cell)
        ratio = base.get(cell["mode"])
        table.add_row(
            name + (" *" if cell is fastest and len(ok) > 1 else ""),
            f"{time['median']:,.1f}",
            f"{50 * (high - low) / time['median']:.1f}%",
            f"{plan:,.0f}" if plan else "-",
            f"{t['total_us']:,.1f}",
            f"{t['total_us'] / ratio:.2f}" if ratio else "-",
            f"{work['useful_tbps'] * (1 if clock == 'kernel' else 1000):.2f}",
            "-" if work["sol_pct"] is None else f"{work['sol_pct']:.0f}%",
            f"{work['moved_bytes'] / work['useful_bytes']:.2f}",
            f"{check['max_abs']:.1e}" if check.get("max_abs") is not None else "unchecked",
            "".join(cell["flags"]) or "-",
        )
    return table


def stage_rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Header and one line per profiled cell (two where a step has several layers), as in the paper's Table 4: us."""
    cells = [cell for cell in cells if "stages" in cell.get("profile", {})]
    shown = [s for s in STAGES if s != UNCLASSIFIED and any(cell["profile"]["stages"][s] for cell in cells)]
    rows = [["shape", "arm", "step us", *shown, UNCLASSIFIED, "gaps", "untraced us", "overhead"]]
    for cell in cells:
        p = cell["profile"]
        times = [p["traced_us"], *(p["stages"][s] for s in shown), p["stages"][UNCLASSIFIED], p["gaps_us"]]
        times.append(p["untraced_us"])
        for name, divisor in [(cell["arm"], 1)] + [(f"{cell['arm']}, per layer", p["layers"])] * (p["layers"] > 1):
            texts = [f"{us / divisor:,.1f}" if us else "-" for us in times]
            texts[-3] += f" ({p['unclassified_pct']:.1f}%)"
            rows.append([cell["shape"]["alias"], name, *texts, f"{p['overhead_pct']:+.1f}%"])
    return rows if len(rows) > 1 else []


def kernel_rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Header and one line per kernel of the profiled cells: time, share and calls, or Nsight Compute's counters."""
    cells = [cell for cell in cells if "profile" in cell]
    if not cells:
        return []
    head = ["shape", "arm", "stage", "kernel", "us"]
    if cells[0]["profile"]["way"] == "ncu":
        rows = [[*head, "DRAM TB/s", "occupancy", "registers", "spilled MB", "launches"]]
    else:
        rows = [[*head, "share", "calls/step"]]
    for cell in cells:
        for k in cell["profile"]["kernels"]:
            start = [cell["shape"]["alias"], cell["arm"], k["stage"], k["name"].removeprefix("void ")[:60]]
            if "share_pct" in k:
                rest = [f"{k['us']:,.1f}", f"{k['share_pct']:.1f}%", f"{k['calls']:g}"]
            else:
                rest = [f"{k['us']:,.1f}", f"{k['dram_tbps']:.2f}", f"{k['occupancy_pct']:.0f}%", str(k["registers"])]
                rest += [f"{k['local_bytes'] / 1e6:.1f}", str(k["launches"])]
            rows.append(start + rest)
    return rows


def _table_of(rows: list[list[str]], left: int) -> Table:
    table = new_table(*rows[0], left=left)
    for row in rows[1:]:
        table.add_row(*(escape(text) for text in row))
    return table


def print_profile(document: dict[str, Any], to_stderr: bool = False) -> None:
    """Per point the stages of a step beside the untraced time, then the kernels; notes, reports and commands."""
    console = new_console(to_stderr)
    _print_device(console, document["env"])
    profiler = document["profiler"]
    on_gpu = document["env"]["device"] == "cuda"
    what = "an engine's decode steps" if is_e2e(document) else "one layer's attention"
    what = f"medians per step, {what}" + ("" if on_gpu else ", of PyTorch's operators on the CPU")
    if profiler["way"] == "ncu":
        what = "medians of single launches, caches flushed before each, clocks as they are"
    console.print(f"{profiler['way']} {profiler['version']}: {what}", markup=False)
    for cells in _by_point(document["cells"]):
        _print_point(console, cells[0])
        for cell in cells:
            if cell["status"] != "ok":
                console.print(f"{cell['arm']}: {cell['status']}", markup=False)
        for rows, left in ((stage_rows(cells), 1), (kernel_rows(cells), 3)):
            if rows:
                console.print()
                console.print(_table_of([row[1:] for row in rows], left))
    profiled = [cell for cell in document["cells"] if "profile" in cell]
    for cell in profiled:
        for note in cell["profile"].get("notes", ()):
            console.print(f"! {cell['arm']}: {note}", markup=False, soft_wrap=True)
    for cell in profiled:
        p = cell["profile"]
        console.print(f"\n{cell['arm']}: {p['report']}\n  {p['command']}", markup=False, soft_wrap=True)


def print_verdicts(result: dict[str, Any], to_stderr: bool = False) -> None:
    """Two saved runs: times, change with its interval, verdict and why; then the counts."""
    lines = [f"A: {result['a']}", f"B: {result['b']}", *(f"! not alike: {line}" for line in result["unlike"]), ""]
    rows = [("cell", "A us", "B us", "change", "95%", "verdict", "why")]
    counts: dict[str, int] = {}
    for row in result["rows"]:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
        cv, interval = row["cv_nominal"], row["interval_pct"]
        lists = "step" if row["kind"] == "e2e" else "real" if cv is None else f"cv {cv:g}"
        rows.append(
            (
                f"{row['arm']} {row['shape']} {lists} {row['mode']}",
                *("-" if us is None else f"{us:,.1f}" for us in (row["a_total_us"], row["b_total_us"])),
                "-" if row["delta_pct"] is None else f"{row['delta_pct']:+.1f}%",
                "-" if interval is None else f"{interval[0]:+.1f} to {interval[1]:+.1f}",
                row["verdict"],
                row["why"],
            )
        )
    lines += [*columns(rows), "", ", ".join(f"{count} {word}" for word, count in counts.items())]
    if any(row["delta_pct"] is not None and min(row["a_launches"], row["b_launches"]) < 3 for row in result["rows"]):
        lines.append("! Fewer than three launches: variation from launch to launch is not in the intervals.")
    print("\n".join(lines), file=sys.stderr if to_stderr else sys.stdout)


def csv_text(columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> str:
    """Comma-separated values with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown_tables(tables: Iterable[list[list[str]]]) -> str:
    """Markdown tables, each from its header and lines; empty ones are left out."""
    texts = []
    for head, *rows in filter(None, tables):
        lines = [head, ["---"] * len(head), *([text.replace("|", "\\|") for text in row] for row in rows)]
        texts.append("".join("| " + " | ".join(line) + " |\n" for line in lines))
    return "\n".join(texts)
