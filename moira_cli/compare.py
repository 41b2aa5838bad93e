"""`moira compare`: arms side by side over several launches, or two saved runs with a verdict per cell.

Live, every launch is a process of its own that measures all arms of a point one after the other, in an order that turns
round from launch to launch, so that drift and start-up state hit every arm alike. A cell's time is the median of its
launches' medians; its interval resamples launches and the samples within them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moira_cli.errors import CliError, ExitCode, unknown
from moira_cli.records import plan_us
from moira_cli.shapes import PAPER_SHAPES, split_list

if TYPE_CHECKING:
    import numpy as np

SUITES: dict[str, list[dict[str, str]]] = {
    "table6": [{"shape": ",".join(PAPER_SHAPES), "cv": "0,1"}, {"shape": ",".join(PAPER_SHAPES), "lists": "real"}],
    "smoke": [{"shape": "1kx2", "cv": "0,1"}, {"shape": "1kx2", "lists": "real"}],
}
"""Named sets of `bench kernel` options: the paper's Table 6, and one that takes seconds anywhere."""

SUITE_OPTIONS = ("shape", "cv", "lists", "keep", "geometry", "page_size", "kv_layout", "mode", "l2", "seed")
PLAN_FILE = "compare.json"
MUST_AGREE = (
    *("min_samples", "min_time_ms", "max_noise", "timeout_s", "check", "mode", "l2"),
    *("tokens", "repetitions", "reuse_prefill", "prompts", "gpu_memory_utilization", "max_model_len"),
)
"""Settings of `bench kernel` and of `bench e2e`."""


def load_suite(name: str) -> list[dict[str, str]]:
    """A named suite, or a TOML file with one [[run]] table of `bench kernel` options per set."""
    if name in SUITES:
        return SUITES[name]
    if not name.endswith(".toml"):
        raise unknown("Suite", name, [*SUITES, "FILE.toml"])
    try:
        runs = tomllib.loads(Path(name).read_text(encoding="utf-8")).get("run")
    except (OSError, ValueError) as error:
        raise CliError(f"Suite '{name}' cannot be read: {error}.") from error
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise CliError(f"Suite '{name}': expected at least one [[run]] table of options, e.g. shape = \"32kx16\".")
    for run in runs:
        for option in run:
            if option not in SUITE_OPTIONS:
                raise unknown("Suite option", option, SUITE_OPTIONS)
    return [{option: str(value) for option, value in run.items()} for run in runs]


SAME_CELL = (
    "arm",
    "mode",
    "device",
    "shape",
    "geometry",
    "kv_layout",
    "dtype",
    "lists_digest",
    "cv_nominal",
    "l2_policy",
    "model",
    "weights",
    "selection",
)


def cell_key(cell: dict[str, Any]) -> str:
    """What two cells must share to be compared: everything but the code, the machine and the result."""
    return json.dumps({name: cell.get(name) for name in SAME_CELL}, sort_keys=True)


def is_e2e(document: dict[str, Any]) -> bool:
    """Whether a run is of `bench e2e`."""
    return any(cell.get("kind") == "e2e" for cell in document["cells"])


def clock_of(cell: dict[str, Any]) -> str:
    """'kernel_us' or 'cpu_us'; 'step_us' for a whole decode step."""
    if cell.get("kind") == "e2e":
        return "step_us"
    return "kernel_us" if cell["device"] == "cuda" else "cpu_us"


def launch_samples(cell: dict[str, Any]) -> list[list[float]]:
    """Samples of each launch; a plain `bench` cell is one launch."""
    timing = cell["timing"][clock_of(cell)]
    return timing.get("launches") or [timing["samples"]]


def bootstrap_medians(launches: list[list[float]], seed: int, resamples: int = 1000) -> np.ndarray:
    """[resamples] medians of launch medians, resampling the launches and the samples of each."""
    import numpy as np

    rng = np.random.default_rng(seed)
    arrays = [np.array(launch) for launch in launches]
    medians = np.stack([np.median(rng.choice(a, (resamples, len(a))), axis=1) for a in arrays])
    chosen = rng.integers(len(arrays), size=(len(arrays), resamples))
    return np.median(np.take_along_axis(medians, chosen, axis=0), axis=0)


def merge_launches(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One cell per arm and point from the cells of several launches, in the order of the first."""
    import numpy as np

    merged = []
    for cells in _by_key(documents):
        failed = next((cell for cell in cells if cell["status"] != "ok"), None)
        if failed is not None:
            merged.append(failed)
            continue
        cell = json.loads(json.dumps(cells[0]))
        launches = [launch for each in cells for launch in launch_samples(each)]
        medians = [float(np.median(launch)) for launch in launches]
        median = float(np.median(medians))
        low, high = np.percentile(bootstrap_medians(launches, seed=0), (2.5, 97.5))
        cell["timing"][clock_of(cell)] = {
            "median": median,
            "ci95": [float(low), float(high)],
            "n": sum(map(len, launches)),
            "launch_medians": medians,
            "spread_pct": 100 * (max(medians) - min(medians)) / median,
            "launches": launches,
        }
        plan = cell["timing"]["plan"]
        for part in [name for name in plan if name.endswith("_us")]:
            plan[part] = float(np.median([each["timing"]["plan"][part] for each in cells]))
        cell["timing"]["total_us"] = median + plan_us(cell)
        for work in ("useful", "moved"):
            cell["work"][f"{work}_tbps"] = cell["work"][f"{work}_bytes"] / median / 1e6
        if cell["work"]["read_us"] is not None:
            cell["work"]["sol_pct"] = 100 * cell["work"]["read_us"] / median
        cell["flags"] = sorted({flag for each in cells for flag in each["flags"]})
        merged.append(cell)
    return merged


def _by_key(documents: Iterable[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        for cell in document["cells"]:
            groups.setdefault(cell_key(cell), []).append(cell)
    return groups.values()


def verdict(a: dict[str, Any], b: dict[str, Any], threshold_pct: float) -> dict[str, Any]:
    """B against A: FASTER, SLOWER, SAME, UNCLEAR or NO TIME; the change in percent, its 95% interval, and why."""
    import numpy as np

    if a["status"] != "ok" or b["status"] != "ok":
        why = "; ".join(f"{name}: {c['status']}" for name, c in (("A", a), ("B", b)) if c["status"] != "ok")
        return {"verdict": "NO TIME", "delta_pct": None, "interval_pct": None, "why": why}
    ours, theirs = launch_samples(a), launch_samples(b)
    delta = 100 * (b["timing"]["total_us"] / a["timing"]["total_us"] - 1)
    if ours == theirs:
        return {"verdict": "SAME", "delta_pct": 0.0, "interval_pct": [0.0, 0.0], "why": "the same samples"}
    ratios = (bootstrap_medians(theirs, seed=1) + plan_us(b)) / (bootstrap_medians(ours, seed=2) + plan_us(a))
    low, high = (float(x) for x in 100 * (np.percentile(ratios, (2.5, 97.5)) - 1))
    if low > threshold_pct:
        word, why = "SLOWER", f"the whole interval is above +{threshold_pct:g}%"
    elif high < -threshold_pct:
        word, why = "FASTER", f"the whole interval is below -{threshold_pct:g}%"
    elif -threshold_pct <= low and high <= threshold_pct:
        word, why = "SAME", f"the interval is within {threshold_pct:g}%"
    else:
        word, why = "UNCLEAR", f"the interval crosses {threshold_pct:g}%: take more samples or launches"
    return {"verdict": word, "delta_pct": delta, "interval_pct": [low, high], "why": why}


def parse_fail_on(text: str) -> float:
    """'slower:3%' -> 3.0."""
    match = re.fullmatch(r"slower:(\d+(?:\.\d+)?)%?", text)
    if match is None:
        raise CliError(f"--fail-on: expected slower:PERCENT, e.g. slower:3%, got '{text}'.")
    return float(match[1])


def unlike(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Ways in which two runs' machines or settings differ, other than the code that is being compared."""
    from moira_cli.environment import identity

    ids = identity(a["env"]), identity(b["env"])
    differences = [f"{name}: {ids[0][name]} / {ids[1][name]}" for name in ids[0] if ids[0][name] != ids[1][name]]
    configs = a["config_resolved"], b["config_resolved"]
    return differences + [
        f"{name}: {configs[0].get(name)} / {configs[1].get(name)}"
        for name in MUST_AGREE
        if configs[0].get(name) != configs[1].get(name)
    ]


def load_run(path: Path) -> dict[str, Any]:
    """A run's document from its folder or its JSON file."""
    file = path / "run.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CliError(f"Run '{path}' cannot be read: {error}. Expected a run folder or its run.json.") from error
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list) or "env" not in document:
        raise CliError(f"Run '{path}' is not a moira run: it has no 'env' and 'cells'.")
    return document


def compare_saved(paths: list[Path], threshold: float, allow_unlike: bool) -> dict[str, Any]:
    """The verdicts of two saved runs, cells matched by what they measured."""
    a, b = (load_run(path) for path in paths)
    differences = unlike(a, b)
    if differences and not allow_unlike:
        raise CliError(
            f"The runs are not alike ({'; '.join(differences)}), so their times do not compare the code. "
            "Pass --allow-unlike to compare all the same."
        )
    if is_e2e(a) != is_e2e(b):
        raise CliError("One run is of 'bench e2e' and the other is not: nothing in them compares.")
    if is_e2e(a):
        from moira_cli.e2e_cells import merge_launches

        a, b = ({**run, "cells": merge_launches(run["cells"])} for run in (a, b))
    left = {cell_key(cell): cell for cell in a["cells"]}
    right = {cell_key(cell): cell for cell in b["cells"]}
    rows = []
    for key in [*left, *(key for key in right if key not in left)]:
        cell = left.get(key) or right[key]
        row = {
            "arm": cell["arm"],
            "mode": cell["mode"],
            "shape": cell["shape"]["alias"],
            "kind": cell.get("kind"),
            "cv_nominal": cell["cv_nominal"],
        }
        if key in left and key in right:
            row |= verdict(left[key], right[key], threshold)
        else:
            missing = "B" if key in left else "A"
            row |= {"verdict": "NO TIME", "delta_pct": None, "interval_pct": None, "why": f"not in run {missing}"}
        for name, measured in (("a", left.get(key)), ("b", right.get(key))):
            timed = measured is not None and measured["status"] == "ok"
            row[f"{name}_total_us"] = measured["timing"]["total_us"] if timed else None
            row[f"{name}_launches"] = len(launch_samples(measured)) if timed else 0
        rows.append(row)
    return {"a": str(paths[0]), "b": str(paths[1]), "threshold_pct": threshold, "unlike": differences, "rows": rows}


@dataclass(frozen=True)
class Plan:
    """What a live comparison measures; ``compare.json`` in its folder, so that it can be resumed.

    Attributes:
        runs: `bench kernel` options of each set of points.
        arms: arms in the order of the first launch.
        launches: processes per set of points.
        relative_to: arm of the ratio column; None for the fastest.
        argv: the command that began it.
    """

    runs: list[dict[str, str]]
    arms: list[str]
    launches: int
    relative_to: str | None
    argv: list[str]


def run_launches(plan: Plan, folder: Path, progress: str) -> Iterator[list[dict[str, Any]]]:
    """The documents of one launch after the other, one document per set of points.

    Each comes from a `bench kernel` of its own, with the arms forwards and backwards in turn. What an earlier call left
    in ``folder`` is not measured again. Ctrl-C, here or there, is a ``KeyboardInterrupt``.
    """
    for launch in range(plan.launches):
        order = plan.arms if launch % 2 == 0 else plan.arms[::-1]
        documents = []
        for number, options in enumerate(plan.runs):
            target = folder / f"launch-{launch + 1}" / str(number)
            done = load_run(target) if (target / "run.json").exists() else {}
            if done.get("status") != "complete":
                done = _bench_kernel(target, options, order, f"launch {launch + 1}/{plan.launches}", progress)
            documents.append(done)
        yield documents


def _bench_kernel(target: Path, options: dict[str, str], arms: list[str], label: str, progress: str) -> dict[str, Any]:
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    if (target / "run.json").exists():
        arguments = ["--resume", str(target)]
    else:
        arguments = [*flags, "--arms", ",".join(arms), "--run-dir", str(target)]
    if progress == "plain":
        print(f"moira: {label}, {' '.join(flags)}", file=sys.stderr)
    command = [sys.executable, "-m", "moira_cli.main", "bench", "kernel", *arguments, "--progress", "none"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == ExitCode.CANCELLED:
        raise KeyboardInterrupt
    document = load_run(target) if (target / "run.json").exists() else None
    if document is None or document["status"] != "complete":
        reason = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1].removeprefix("moira: ")
        known = {int(code) for code in ExitCode}
        raise CliError(reason, ExitCode(done.returncode) if done.returncode in known else ExitCode.INTERNAL)
    return document


def compare(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN_A RUN_B]", help="Two saved runs; none to run live.")
    ] = None,
    baselines: Annotated[
        str, typer.Option("--baselines", "--arms", help="Live: arms, comma-separated, or all.")
    ] = "all",
    skip: Annotated[str, typer.Option(help="Live: arms to leave out.")] = "",
    suite: Annotated[str | None, typer.Option(help="Live: table6, smoke, or a TOML file of run tables.")] = None,
    shape: Annotated[str | None, typer.Option(help="Live: shapes, comma-separated.")] = None,
    cv: Annotated[str | None, typer.Option(help="Live: spreads of synthetic lengths, comma-separated.")] = None,
    lists: Annotated[str | None, typer.Option(help="Live: real, synthetic or FILE.")] = None,
    launches: Annotated[int, typer.Option(min=1, help="Live: processes per arm.")] = 3,
    relative_to: Annotated[
        str | None, typer.Option(help="Live: arm of the ratio column. (default: the fastest)")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Live: folder for the results.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Live: finish the comparison in this folder.")] = None,
    threshold: Annotated[float, typer.Option(help="Saved: changes within this percentage are SAME.")] = 1.0,
    fail_on: Annotated[str | None, typer.Option(help="Saved: exit 7 on slower:PERCENT, e.g. slower:3%.")] = None,
    allow_unlike: Annotated[
        bool, typer.Option("--allow-unlike", help="Saved: other hardware or settings too.")
    ] = False,
    output_json: Annotated[str | None, typer.Option(help="Write the result as JSON to FILE, or - for stdout.")] = None,
    progress: Annotated[str, typer.Option(help="plain or none; on stderr.")] = "plain",
) -> None:
    """Rank arms on the same lists over several launches, or give a verdict on two saved runs.

    Live, arms are ranked by total time, host plan included; arms that cannot run here are rows that say why.
    """
    from moira_cli.records import require_writable

    if output_json not in (None, "-"):
        require_writable(Path(output_json), "--output-json")
    limit = None if fail_on is None else parse_fail_on(fail_on)
    if runs:
        if len(runs) != 2:
            raise CliError(f"compare takes two saved runs, or none to run live; got {len(runs)}.")
        _saved(runs, threshold, limit, allow_unlike, output_json)
        return
    if limit is not None:
        raise CliError("--fail-on compares two saved runs: name them.")
    if resume is not None:
        _live(_load_plan(resume), resume, output_json, progress)
        return
    options = load_suite(suite) if suite else [{}]
    for name, value in (("shape", shape), ("cv", cv), ("lists", lists)):
        if value is not None:
            options = [{**option, name: value} for option in options]
    plan = Plan(options, _choose_arms(baselines, skip, relative_to), launches, relative_to, sys.argv[1:])
    _live(plan, _new_folder(run_dir, plan), output_json, progress)


def _saved(
    paths: list[Path], threshold: float, limit: float | None, allow_unlike: bool, output_json: str | None
) -> None:
    from moira_cli.records import emit
    from moira_cli.render import print_verdicts

    result = compare_saved(paths, threshold, allow_unlike)
    tripped = [
        row for row in result["rows"] if limit is not None and row["verdict"] == "SLOWER" and row["delta_pct"] >= limit
    ]
    result["tripped"] = len(tripped)
    emit(result, output_json)
    print_verdicts(result, to_stderr=output_json == "-")
    if tripped:
        print(f"moira: {len(tripped)} cells are slower by {limit:g}% or more.", file=sys.stderr)
        raise typer.Exit(ExitCode.REGRESSION)


def _choose_arms(text: str, skip: str, relative_to: str | None) -> list[str]:
    import baselines

    known = baselines.names("attention")
    arms, left_out = known if text == "all" else split_list(text), split_list(skip)
    for arm in [*arms, *left_out, *([relative_to] if relative_to else [])]:
        if arm not in known:
            raise unknown("Arm", arm, known)
    return [arm for arm in arms if arm not in left_out]


def _new_folder(run_dir: Path | None, plan: Plan) -> Path:
    from moira_cli import environment, records

    folder = run_dir or records.new_run_folder("compare", environment.code_version())
    if (folder / PLAN_FILE).exists() or (folder / "run.json").exists():
        raise CliError(
            f"'{folder}' already holds a run. Continue it with --resume {folder}, or name another --run-dir."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        records.write_atomically(folder / PLAN_FILE, records.dumps(asdict(plan), indent=1) + "\n")
    except OSError as error:
        raise CliError(f"Run folder '{folder}' cannot be written: {error.strerror}. Name another --run-dir.") from error
    return folder


def _load_plan(folder: Path) -> Plan:
    try:
        return Plan(**json.loads((folder / PLAN_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CliError(f"'{folder}' is not the folder of a live 'moira compare': {error}.") from error


def _live(plan: Plan, folder: Path, output_json: str | None, progress: str) -> None:
    from moira_cli import records
    from moira_cli.render import print_run

    documents: list[dict[str, Any]] = []
    launches, cancelled, run, document = 0, False, None, {}
    try:
        for launch in run_launches(plan, folder, progress):
            documents += launch
            launches += 1
            first = documents[0]
            config = {**first["config_resolved"], **asdict(plan), "launches": launches}
            head = records.header(config.pop("argv"), config, first["env"], first["tool"])
            run = records.Run(folder, {**head, "run_id": folder.name}, merge_launches(documents))
            document = run.save("running")
    except KeyboardInterrupt:
        cancelled = True
    if run is not None:
        code = records.exit_code(run.cells, cancelled=cancelled)
        document = run.save("cancelled" if cancelled else "complete", code)
        records.emit(document, output_json)
        print_run(document, to_stderr=output_json == "-", ranked=True)
        for reason in dict.fromkeys(cell["reason"] for cell in run.cells if cell["status"] != "ok"):
            records.warn(reason)
    if cancelled:
        records.warn(
            f"Stopped after {launches}/{plan.launches} launches. Results saved. "
            f"Continue: moira compare --resume {folder}"
        )
        raise typer.Exit(ExitCode.CANCELLED)
    raise typer.Exit(code)
