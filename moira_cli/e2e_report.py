"""A run of `bench e2e` as tables, on the terminal and flat: a row per arm and shape, its launches put together."""

from __future__ import annotations

from statistics import median
from typing import Any

from moira_cli.e2e_cells import TPOT_METHODS, merge_launches, speedups
from moira_cli.render import csv_text, kernel_rows, markdown_tables, new_console, new_table, stage_rows

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


def print_e2e(document: dict[str, Any], to_stderr: bool = False) -> None:
    """The table of a `bench e2e` run: one part per shape, one line per arm, its launches put together."""
    console = new_console(to_stderr)
    env, config = document["env"], document["config_resolved"]
    on_gpu = env["device"] == "cuda"
    console.print(machine(env))
    cells = merge_launches(document["cells"])
    for line in _notes(cells, config):
        console.print(line, markup=False)
    parts: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        parts.setdefault(cell["shape"]["alias"], []).append(cell)
    for label, arms in parts.items():
        shape = arms[0]["shape"]
        console.print(f"\n[bold]{label}[/bold]  {shape['batch']} requests of {shape['context_tokens']:,} tokens")
        base = next((cell for cell in arms if cell["arm"] == config["relative_to"] and cell["status"] == "ok"), None)
        tried = config["engine"] == "transformers"
        table = new_table(
            "arm", "TPOT ms" if on_gpu else "cpu ms", "+-95%", "x", "per launch", "TTFT ms",
            "tok/s", "reads", *(("same token", "KL") if tried else ("KV tokens", "graph")), "flags",
        )  # fmt: skip
        for cell in arms:
            if cell["status"] != "ok":
                table.add_row(cell["arm"], cell["status"])
                continue
            time = cell["timing"]["step_us"]
            low, high = time["ci95"]
            ratios = speedups(cell, base) if base else []
            if tried:
                agreement = cell.get("agreement")
                last = (f"{agreement['same_token']:.0%}", f"{agreement['kl_mean']:.1e}") if agreement else ("-", "-")
            else:
                last = (f"{cell['kv_capacity_tokens']:,}", "full" if cell["mode"] == "graph" else "none")
            table.add_row(
                cell["arm"],
                f"{time['median'] / 1e3:,.2f}",
                f"{50 * (high - low) / time['median']:.1f}%",
                f"{median(ratios):.2f}" if ratios else "-",
                f"{min(ratios):.2f}-{max(ratios):.2f}" if len(ratios) > 1 else "-",
                f"{cell['ttft_ms']['median']:,.0f}",
                f"{cell['out_tok_s']:,.1f}",
                f"{cell['page_read_fraction']:.1%}",
                *last,
                "".join(cell["flags"]) or "-",
            )
        console.print(table)


def machine(env: dict[str, Any]) -> str:
    """Device and versions of a run, in one line."""
    names = ("torch", "triton", "vllm", "flashinfer-python", "transformers")
    versions = ", ".join(f"{name} {env['libraries'][name]}" for name in names if env["libraries"].get(name))
    if env["device"] == "cuda":
        return f"{env['gpu']['name']}, driver {env['gpu']['driver']}, {versions}"
    return f"device: cpu ({env['cpu']}, {env['cpu_threads']} threads) - a try-out on the CPU, no GPU time, {versions}"


def _notes(cells: list[dict[str, Any]], config: dict[str, Any]) -> list[str]:
    """What a reader must know: weights, where page counts are from, how the TPOT was measured."""
    chosen = [cell["selection"] for cell in cells if cell["selection"]]
    weights = {cell["weights"] for cell in cells}
    lines = [f"{config['model']}, {' and '.join(sorted(weights))} weights; {config['tokens']} tokens per request"]
    if profiles := {c["profile"] for c in chosen if "profile" in c}:
        sources = {c["reads_source"] for c in chosen if "profile" in c}
        lines.append(
            f"page counts: the profile of {' and '.join(sorted(profiles))}, scaled to a mean read fraction "
            f"({', '.join(sorted(sources))}); Estimate and Select run and are paid for"
        )
    elif chosen:
        lines.append(f"page counts: the coverage rule, gamma {config['gamma']:g}")
    used = dict.fromkeys(cell["tpot_method"] for cell in cells if cell["status"] == "ok")
    lines += [f"TPOT: {name}, {TPOT_METHODS[name]}" for name in used]
    lines.append(f"x: TPOT of {config['relative_to']} over the arm's, median over launches and their range")
    return lines


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
    return csv_text(COLUMNS, flat_rows(document))


def to_markdown(document: dict[str, Any]) -> str:
    """A table, and of a profiled run stages and kernels, under a line that says what they were measured on."""

    def cell(name: str, value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:,.{DIGITS.get(name, 1)}f}" if isinstance(value, float) else str(value)

    rows = [[cell(name, value) for name, value in row.items()] for row in flat_rows(document)]
    tables = [[list(COLUMNS), *rows], stage_rows(document["cells"]), kernel_rows(document["cells"])]
    head = f"{machine(document['env'])}, {document['started_utc']}\n\n    {document['repro_command']}"
    return f"{head}\n\n{markdown_tables(tables)}"
