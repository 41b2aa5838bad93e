"""A run of `bench e2e` as flat tables for `moira report`: a row per arm and shape, its launches put together."""

from __future__ import annotations

import csv
import io
from statistics import median
from typing import Any

from moira_cli.e2e_cells import merge_launches, speedups
from moira_cli.render import machine

COLUMNS = {
    "shape": "CONTEXTxBATCH",
    "model": "preset or directory",
    "weights": "dummy or real",
    "arm": "implementation",
    "mode": "graph or eager",
    "device": "cuda or cpu",
    "status": "ok, or what went wrong",
    "launches": "engine starts",
    "tpot_ms": "time per output token: median over launches",
    "ci_low_ms": "95% interval of the median",
    "ci_high_ms": "95% interval of the median",
    "tpot_method": "how it was measured",
    "speedup": "TPOT of --relative-to over that of the arm, median over launches",
    "speedup_min": "least over launches",
    "speedup_max": "most over launches",
    "ttft_ms": "time to first token of the cold prefill, median over requests",
    "out_tok_s": "output tokens per second of a repetition",
    "reads_pct": "pages read in the decode steps, counted on the device, percent",
    "kv_capacity_tokens": "tokens that the engine's KV cache holds",
    "cudagraph_mode": "as the engine resolved it",
    "flags": "see moira bench e2e --help",
    "reason": "why there is no time",
}
"""Columns and what they hold."""
MEASURED = ("tpot_method", "out_tok_s", "kv_capacity_tokens", "cudagraph_mode")
DIGITS = {"tpot_ms": 3, "ci_low_ms": 3, "ci_high_ms": 3, "speedup": 3, "speedup_min": 3, "speedup_max": 3}


def flat_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One flat dict of COLUMNS per arm and shape; None where there is no value."""
    cells = merge_launches(document["cells"])
    relative_to = document["config_resolved"]["relative_to"]
    bases = {c["shape"]["alias"]: c for c in cells if c["arm"] == relative_to and c["status"] == "ok"}
    rows = []
    for cell in cells:
        row = dict.fromkeys(COLUMNS)
        row |= {name: cell.get(name) for name in ("model", "weights", "arm", "mode", "device", "status", "reason")}
        row["shape"] = cell["shape"]["alias"]
        if cell["status"] == "ok":
            row |= {name: cell.get(name) for name in MEASURED}
            time, base = cell["timing"]["step_us"], bases.get(row["shape"])
            low, high = time["ci95"]
            row |= {"tpot_ms": time["median"] / 1e3, "ci_low_ms": low / 1e3, "ci_high_ms": high / 1e3}
            row |= {"launches": len(cell["launch_tpot_ms"]), "ttft_ms": cell["ttft_ms"]["median"]}
            row |= {"reads_pct": 100 * cell["page_read_fraction"], "flags": "".join(cell["flags"])}
            if base and (ratios := speedups(cell, base)):
                row |= {"speedup": median(ratios), "speedup_min": min(ratios), "speedup_max": max(ratios)}
        rows.append(row)
    return rows


def to_csv(document: dict[str, Any]) -> str:
    """Comma-separated values with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat_rows(document))
    return text.getvalue()


def to_markdown(document: dict[str, Any]) -> str:
    """A Markdown table under a line that says what it was measured on and the command that repeats it."""

    def cell(name: str, value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:,.{DIGITS.get(name, 1)}f}" if isinstance(value, float) else str(value).replace("|", "\\|")

    rows = [[cell(name, value) for name, value in row.items()] for row in flat_rows(document)]
    lines = ["| " + " | ".join(line) + " |" for line in [list(COLUMNS), ["---"] * len(COLUMNS), *rows]]
    head = f"{machine(document['env'])}, {document['started_utc']}\n\n    {document['repro_command']}"
    return f"{head}\n\n" + "\n".join(lines) + "\n"
