"""`moira list`: names that other commands take. Imports neither torch nor any optional library, except for `lists`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Topic(StrEnum):
    """What can be listed."""

    ARMS = "arms"
    SHAPES = "shapes"
    GEOMETRIES = "geometries"
    LISTS = "lists"
    SUITES = "suites"
    E2E = "e2e"
    METRICS = "metrics"
    RUNS = "runs"


METRICS = {
    "kernel_us": "time of one call on the GPU: median over samples, each a CUDA-graph replay divided by its calls",
    "cpu_us": "wall-clock time of one call on the CPU; never comparable with kernel_us",
    "plan": "host work whenever lists change: d2h_us (lengths to the host), index_build_us, plan_call_us",
    "total_us": "kernel_us (or cpu_us) + plan; arms are ranked by it",
    "cv_measured": "standard deviation over mean of the rows' page counts, after clipping",
    "kept_fraction": "pages listed over pages of the context, all rows",
    "useful_tbps": "bytes of the listed keys and values over time, decimal TB/s",
    "moved_bytes": "bytes of keys and values that the arm moves: padding, copies and unlisted pages included",
    "sol_pct": "time of a kernel that only reads the useful bytes (same run) over kernel_us",
    "tpot_ms": "bench e2e: time per output token; tpot_method says how it was measured",
    "ttft_ms": "bench e2e: time to first token of the cold prefill, all prompts submitted at once",
    "page_read_fraction": "bench e2e: pages read over pages of the context in decode steps, counted on the device",
    "max_abs": "largest difference from the float32 reference; the limit is 2 x bf16 PyTorch's own + 2 ulp",
    "stages": "moira profile: microseconds of a step by stage, told by kernel name; what no name tells is unclassified",
    "traced_us": "moira profile: a step under the profiler; overhead is over the untraced kernel_us (or cpu_us)",
    "gaps_us": "moira profile: the part of the traced step in which nothing ran",
    "implementation": "library and version of the arm's kernel, where it is not this project's or the arm has a choice",
}


def _rows(topic: Topic) -> list[tuple[str, ...]]:
    from moira_cli import shapes

    if topic is Topic.ARMS:
        import baselines

        return [
            (arm.name, f"needs {', '.join(arm.needs).replace('|', ' or ')}" if arm.needs else "any device", arm.summary)
            for arm in baselines.describe(None).values()
        ]
    if topic is Topic.SHAPES:
        parsed = (shapes.parse_shape(label) for label in shapes.PAPER_SHAPES)
        return [(s.label, f"{s.context_tokens:,} tokens x {s.batch} requests") for s in parsed] + [
            ("CONTEXTxBATCH", "k = 1,024; 130k = 130,048 (127 x 1,024)")
        ]
    if topic is Topic.GEOMETRIES:
        return [(name, f"{q} query heads, {kv} KV heads, D = {d}") for name, (q, kv, d) in shapes.GEOMETRIES.items()]
    if topic is Topic.E2E:
        from moira_cli.models import PRESETS
        from moira_cli.serving import ARMS

        arms = [(f"arm {name}", arm.summary) for name, arm in ARMS.items()]
        suites = [(f"suite {name}", ", ".join(labels)) for name, labels in shapes.E2E_SUITES.items()]
        models = [
            (f"model {name}", f"{config['num_hidden_layers']} layers, dummy weights")
            for name, config in PRESETS.items()
        ]
        return [*arms, *suites, *models]
    if topic is Topic.METRICS:
        return list(METRICS.items())
    if topic is Topic.SUITES:
        from moira_cli.compare import SUITES

        described = []
        for name, runs in SUITES.items():
            sets = (" ".join(f"{option} {value}" for option, value in run.items()) for run in runs)
            described.append((name, "; ".join(sets)))
        return [*described, ("FILE.toml", "[[run]] tables of bench kernel options")]
    if topic is Topic.LISTS:
        from moira_cli.lists import SHIPPED, load_recorded, summarize

        recorded = load_recorded(SHIPPED)
        kept = summarize(recorded)["estimated"]["mean_fraction"]
        return [
            ("synthetic", "lognormal lengths of a given mean and CV (--keep, --cv)"),
            ("real", f"{recorded.label}, {kept:.1%} kept ({SHIPPED.name}, shipped)"),
            ("FILE.npz", "a recording made by 'moira record'"),
        ]
    rows = []
    for path in sorted(Path("runs").glob("*/run.json")):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            rows.append((str(path.parent), run["status"], f"{len(run['cells'])} cells", run["repro_command"]))
        except (OSError, ValueError, KeyError) as error:
            rows.append((str(path.parent), "not readable", str(error)))
    return rows


def list_names(topic: Annotated[Topic, typer.Argument(help="What to list.")]) -> None:
    """List arms, shapes, geometries, page-list sources, suites, names of bench e2e, metrics, or the runs in ./runs."""
    from moira_cli.render import columns

    print("\n".join(columns(_rows(topic))))
