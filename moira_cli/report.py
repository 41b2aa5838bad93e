"""`moira report`: a saved run as a table for people or programs, or as pictures."""

from __future__ import annotations

import html
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from moira_cli.compare import clock_of, is_e2e, load_run
from moira_cli.errors import CliError
from moira_cli.records import dumps, plan_us, require_writable, write_atomically
from moira_cli.render import csv_text, kernel_rows, markdown_tables, stage_rows


class Format(StrEnum):
    """What `moira report` writes."""

    MD = "md"
    CSV = "csv"
    JSON = "json"
    HTML = "html"
    PNG = "png"


COLUMNS = {
    "shape": "CONTEXTxBATCH",
    "rows": "(request, list head) pairs",
    "kv_layout": "nhd or hnd",
    "lists": "synthetic, or the recording",
    "cv_nominal": "spread asked for",
    "cv_measured": "spread of the page counts",
    "kept_pct": "pages listed, percent",
    "arm": "name in 'moira list arms'",
    "implementation": "library of its kernel",
    "mode": "graph or eager",
    "device": "cuda or cpu",
    "status": "ok, or what went wrong",
    "time_us": "median of one call",
    "ci_low_us": "95% interval of the median",
    "ci_high_us": "95% interval of the median",
    "plan_us": "host plan",
    "total_us": "time + plan",
    "useful_tbps": "listed bytes over time",
    "sol_pct": "read-only time over time",
    "moved_over_useful": "bytes moved over listed bytes",
    "max_abs": "largest difference from float32",
    "flags": "see moira bench kernel --help",
    "reason": "why there is no time",
}
"""Columns of the flat table and what they hold."""
SAME_NAME = ("kv_layout", "arm", "implementation", "mode", "device", "status", "reason")
"""Columns that are fields of a cell."""


def flat_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One flat dict of COLUMNS per cell; None where there is no value."""
    rows = []
    for cell in document["cells"]:
        row = dict.fromkeys(COLUMNS)
        row |= {name: cell.get(name) for name in SAME_NAME}
        row |= {"shape": cell["shape"]["alias"], "rows": cell["shape"]["rows"], "lists": cell["length_source"]}
        row |= {"cv_nominal": cell["cv_nominal"], "cv_measured": cell["cv_measured"]}
        row["kept_pct"] = 100 * cell["kept_fraction"]
        if cell["status"] == "ok":
            timing, work, time = cell["timing"], cell["work"], cell["timing"][clock_of(cell)]
            row |= {"time_us": time["median"], "ci_low_us": time["ci95"][0], "ci_high_us": time["ci95"][1]}
            row |= {"plan_us": plan_us(cell), "total_us": timing["total_us"], "useful_tbps": work["useful_tbps"]}
            row["sol_pct"] = work["sol_pct"]
            row["moved_over_useful"] = work["moved_bytes"] / work["useful_bytes"]
            row |= {"max_abs": cell["check"].get("max_abs"), "flags": "".join(cell["flags"])}
        rows.append(row)
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return str(value)


def title(document: dict[str, Any]) -> str:
    """Device, versions, code and date of a run, in one line."""
    env, tool = document["env"], document["tool"]
    device = env["gpu"]["name"] if env["device"] == "cuda" else f"cpu ({env['cpu']})"
    code = tool["version"] + (f" {tool['commit']}{'-dirty' * bool(tool['dirty'])}" if tool.get("commit") else "")
    versions = env["libraries"]
    return f"{device}, torch {versions['torch']}, triton {versions['triton']}, moira {code}, {document['started_utc']}"


def matrix(document: dict[str, Any]) -> list[list[str]]:
    """Points by arms, with a header: kernel (or cpu) us, and the host plan after a plus where there is one."""
    arms = list(dict.fromkeys(cell["arm"] for cell in document["cells"]))
    points: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in document["cells"]:
        cv = cell["cv_nominal"]
        lists = cell["length_source"] if cv is None else f"CV {cv:g} ({cell['cv_measured']:.2f})"
        key = (cell["shape"]["alias"], str(cell["shape"]["rows"]), lists, cell["kv_layout"], cell["mode"])
        text = cell["status"]
        if text == "ok":
            plan = plan_us(cell)
            text = f"{cell['timing'][clock_of(cell)]['median']:,.1f}" + (f" + {plan:,.0f}" if plan else "")
        points.setdefault(key, {})[cell["arm"]] = text
    header = ["shape", "rows", "lists", "layout", "mode", *arms]
    return [header, *([*key, *(times.get(arm, "-") for arm in arms)] for key, times in points.items())]


def to_csv(document: dict[str, Any]) -> str:
    """Comma-separated values with a header."""
    return csv_text(COLUMNS, flat_rows(document))


def _tables(document: dict[str, Any]) -> list[list[list[str]]]:
    """Times by point and arm, every column and, of a profiled run, stages and kernels; each starts with its header."""
    flat = [list(COLUMNS), *([_text(row[name]) for name in COLUMNS] for row in flat_rows(document))]
    cells = document["cells"]
    return [matrix(document), flat, *filter(None, (stage_rows(cells), kernel_rows(cells)))]


def to_markdown(document: dict[str, Any]) -> str:
    """The tables under a line that says what they were measured on and the command that repeats it."""
    clock = "cpu" if document["env"]["device"] == "cpu" else "kernel"
    what = f"{clock} us, + host plan us; launches: {document['config_resolved'].get('launches', 1)}"
    return f"{title(document)}\n\n    {document['repro_command']}\n\n{what}\n\n{markdown_tables(_tables(document))}"


def to_json(document: dict[str, Any]) -> str:
    """The run as it is."""
    return dumps(document, indent=1) + "\n"


def to_html(document: dict[str, Any]) -> str:
    """One self-contained page: what was measured, the pictures, the table."""
    import base64

    from moira_cli.plots import figures

    def cells(tag: str, values: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    tables = [
        f"<table>{cells('th', head)}{''.join(cells('td', row) for row in rows)}</table>"
        for head, *rows in _tables(document)
    ]
    pictures = [
        f'<figure><img alt="{name}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></figure>'
        for name, png in figures(document).items()
    ]
    style = (
        "body{font-family:sans-serif;margin:2em}table{border-collapse:collapse;font-size:small;margin:1em 0}"
        "td,th{border:1px solid #ccc;padding:2px 6px;text-align:right;white-space:nowrap}figure{margin:1em 0}"
    )
    heading = html.escape(title(document))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>moira report</title><style>{style}</style>'
        f"<h1>moira report</h1><p>{heading}</p><pre>{html.escape(document['repro_command'])}</pre>"
        f"{tables[0]}{''.join(pictures)}{''.join(tables[1:])}</html>\n"
    )


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or its run.json.")],
    output_format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.MD,
    output: Annotated[
        Path | None, typer.Option(help="File to write (png: one per picture, NAME-<picture>.png). (default: stdout)")
    ] = None,
) -> None:
    """Write a saved run as Markdown, CSV, JSON, a self-contained HTML page, or PNG pictures.

    Pictures: time against CV per shape, time against rows, the pages of each thread block; of a profiled run the
    stages of a step per arm, and a timeline of one layer.
    """
    document = load_run(run)
    writers = {Format.MD: to_markdown, Format.CSV: to_csv, Format.HTML: to_html, Format.JSON: to_json}
    if is_e2e(document):
        from moira_cli import e2e_report

        writers = {Format.MD: e2e_report.to_markdown, Format.CSV: e2e_report.to_csv, Format.JSON: to_json}
        profiled = any("profile" in cell for cell in document["cells"])
        if output_format not in writers and not (profiled and output_format is Format.PNG):
            raise CliError(f"--format {output_format}: a run of 'bench e2e' is written as md, csv or json.")
    if output is not None:
        require_writable(output, "--output")
    if output_format is Format.PNG:
        from moira_cli.plots import figures

        if output is None:
            raise CliError("--format png: name the files with --output NAME.png.")
        pictures = figures(document)
        if not pictures:
            raise CliError("The run has nothing to draw: it needs two CVs, two numbers of rows, or a profile.")
        for name, png in pictures.items():
            target = output.with_name(f"{output.stem}-{name}.png")
            write_atomically(target, png)
            print(target)
        return
    text = writers[output_format](document)
    if output is None:
        sys.stdout.write(text)
    else:
        write_atomically(output, text)
