"""`moira profile`: where a step's time goes.

The cells are first measured by `moira bench` itself, in a process of its own; then each one is built again in a process
under the profiler (``moira_cli.capture``; of an engine ``moira_cli.capture_engine``), and the records are added up by
stage. A step is slower under a profiler, so both times are shown and the difference is named.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moira_cli.errors import CliError, ExitCode, ProfilerError

if TYPE_CHECKING:
    from moira_cli.records import Run

CAPTURE = (sys.executable, "-m", "moira_cli.capture")
CAPTURE_ENGINE = (sys.executable, "-m", "moira_cli.capture_engine")
TARGETS = ("kernel", "e2e")
NEEDED_STAGES = {
    "moira": ("Attend", "Merge"),
    "moira-eq4": ("Attend", "Merge"),
    "moira-layer": ("Estimate", "Select", "Attend", "Merge"),
}
"""What must be in the trace of an arm of this project: a run that became something else fails."""
NEEDED_STAGES_OF_ENGINES = {
    "dense-fa3": ("FA3",),
    "dense-flashinfer": ("FlashInfer",),
    "moira": ("Estimate", "Select", "Attend", "Merge"),
    "fa3-coverage": ("Estimate", "Select", "FA3"),
    "flashinfer-coverage": ("Estimate", "Select", "FlashInfer"),
}
"""The same for an engine's decode steps."""


def way_asked_for(target: str, nsys: bool, ncu: bool, torch: bool) -> str | None:
    """'nsys', 'ncu', 'torch' or None; a missing tool is reported here, before anything is measured."""
    from moira_cli.profilers import require

    asked = [name for name, given in (("nsys", nsys), ("ncu", ncu), ("torch", torch)) if given]
    if len(asked) > 1:
        raise CliError(f"--{' and --'.join(asked)}: choose one.")
    if target == "e2e" and ncu:
        raise CliError(
            "--ncu runs every kernel many times over, too slow for an engine. Use 'moira profile --ncu kernel'."
        )
    if asked and asked[0] != "torch":
        require(asked[0])
        if target == "kernel" and not gpu_visible():  # `bench e2e` says itself what it lacks
            require_gpu(asked[0], "cpu")
    return asked[0] if asked else None


def describe(way: str) -> dict[str, str]:
    """The profiler and its version, for the run's record."""
    from moira_cli import environment
    from moira_cli.profilers import tool_version

    version = environment.library_versions()["torch"] if way == "torch" else tool_version(way)
    return {"way": way, "version": version}


def gpu_visible() -> bool:
    """Whether PyTorch sees a CUDA GPU."""
    import torch

    return torch.cuda.is_available()


def require_gpu(way: str, device: str) -> None:
    """nsys and ncu record what a GPU does."""
    if way != "torch" and device != "cuda":
        raise CliError(
            f"--{way} records CUDA kernels, and this is a run on the cpu. Leave it out: torch.profiler then shows the "
            "operators on the CPU.",
            ExitCode.ENVIRONMENT,
        )


def bench(target: str, options: list[str], folder: Path) -> tuple[int, bool]:
    """Measure the cells with `moira bench`; (exit code, whether there is a run)."""
    command = [sys.executable, "-m", "moira_cli.main", "bench", target, *options, "--run-dir", str(folder)]
    with subprocess.Popen(command, stdout=2) as process:  # its table on stderr: stdout is for the profile
        try:
            code = process.wait()
        except KeyboardInterrupt:
            code = process.wait()  # it has had the Ctrl-C too, and saves what it has
    return code, (folder / "run.json").exists()


def to_profile(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """(place in the run, cell) of what was measured; of an engine's launches the first, with the time over all."""
    from moira_cli.compare import is_e2e
    from moira_cli.e2e_cells import merge_launches

    places = {cell["cell_id"]: number for number, cell in enumerate(run.cells)}
    cells = merge_launches(run.cells) if is_e2e({"cells": run.cells}) else run.cells
    return [(places[cell["cell_id"]], cell) for cell in cells if cell["status"] == "ok"]


def profile_cell(folder: Path, number: int, cell: dict[str, Any], way: str) -> dict[str, Any]:
    """What the cell gets: its ``profile``, or a status and the reason why there is none."""
    from moira_cli import profilers
    from moira_cli.bench_e2e import Progress
    from moira_cli.compare import clock_of

    output = folder / "profiles" / f"{number}-{cell['arm']}-{cell['mode']}"
    flags: tuple[str, ...] = ()
    of_engine = cell.get("kind") == "e2e"
    if of_engine:
        spec, label = folder / "engines" / f"{cell['arm']}-{cell['launch']}.json", cell["shape"]["alias"]
        child = [*CAPTURE_ENGINE, str(spec), label, way, str(output)]
        flags = ("--trace-fork-before-exec=true",)
        Progress("auto").stage(f"{cell['arm']} at {label}: an engine starts to be profiled")
    else:
        child = [*CAPTURE, str(folder), str(number), way, str(output)]
    untraced_us = cell["timing"][clock_of(cell)]["median"]
    try:
        if way == "ncu":
            profile = profilers.with_ncu(child, output)
        elif way == "nsys":
            profile = profilers.with_nsys(child, output, untraced_us, flags)
        else:
            profile = profilers.with_torch(child, output, untraced_us, cell["device"])
        if not of_engine:
            require_whole(profile)
        needed = NEEDED_STAGES_OF_ENGINES if of_engine else NEEDED_STAGES
        require_stages(needed.get(cell["arm"], ()), profile)
    except ProfilerError as error:
        return {"status": "profile_failed", "reason": f"{cell['arm']}: {error}"}
    return {"profile": profile}


def require_whole(profile: dict[str, Any]) -> None:
    """Every step of one layer's attention runs the same kernels: anything else means that records are missing."""
    if profile.get("uneven"):
        names = ", ".join(f"{name[:60]} {count} times" for name, count in profile["uneven"].items())
        raise ProfilerError(f"records are missing: in {profile['steps']} equal steps there are {names}. Profile again.")


def require_stages(needed: tuple[str, ...], profile: dict[str, Any]) -> None:
    """The stages that the arm must run are there."""
    seen = {kernel["stage"] for kernel in profile["kernels"]}
    if missing := [stage for stage in needed if stage not in seen]:
        names = ", ".join(kernel["name"][:60] for kernel in profile["kernels"])
        raise ProfilerError(f"no kernel of {', '.join(missing)} was recorded, only {names}.")


def profile(
    ctx: typer.Context,
    nsys: Annotated[bool, typer.Option("--nsys", help="Nsight Systems. (default where it is installed)")] = False,
    torch: Annotated[bool, typer.Option("--torch", help="torch.profiler; a Chrome/Perfetto trace.")] = False,
    ncu: Annotated[
        bool, typer.Option("--ncu", help="Nsight Compute: bandwidth, occupancy, registers and spills per kernel.")
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for the results. (default: runs/<utc>_<commit>_profile)")
    ] = None,
    output_json: Annotated[
        str | None, typer.Option(help="Also write the whole run as JSON to FILE, or - for stdout.")
    ] = None,
) -> None:
    """Show where a step's time goes: microseconds per stage, calls and share, and what the profiler itself costs.

    `kernel` takes every option of 'moira bench kernel' for what to run; `--arms moira-layer,dense-fa3` shows all four
    stages beside dense attention. `e2e` takes those of 'moira bench e2e' and shows an engine's decode steps, after one
    launch unless --launches says otherwise. Without either word it is kernel. The report and the exact command are kept
    in the run's folder. Without a GPU `kernel` shows the operators on the CPU, labelled cpu.
    """
    from moira_cli import environment, records
    from moira_cli.render import print_profile

    options = list(ctx.args)
    target = options.pop(0) if options and options[0] in TARGETS else "kernel"
    for option, value in pairwise([*options, ""]):
        if option.split("=")[0] == "--resume":
            raise CliError("--resume: 'moira profile' starts a new run. See 'moira profile --help'.")
        if option == "--engine=transformers" or (option, value) == ("--engine", "transformers"):
            raise CliError("--engine transformers: 'moira profile e2e' profiles vLLM's decode steps. Leave it out.")
    way = way_asked_for(target, nsys, ncu, torch)
    if target == "e2e":
        options = ["--launches", "1", *options]  # the last one counts
    if output_json not in (None, "-"):
        records.require_writable(Path(output_json), "--output-json")
    tool = environment.code_version()
    folder = run_dir or records.new_run_folder("profile", tool)
    if (folder / "run.json").exists():
        raise CliError(f"'{folder}' already holds a run. Name another --run-dir.")
    code, measured = bench(target, options, folder)
    if not measured or code == ExitCode.CANCELLED:
        raise typer.Exit(code)
    run = records.Run.load(folder)
    device = run.header["env"]["device"]
    way = way or ("nsys" if device == "cuda" and environment.profilers()["nsys"] else "torch")
    require_gpu(way, device)
    head = records.header(sys.argv[1:], {}, {}, tool)
    run.header |= {"argv": head["argv"], "repro_command": head["repro_command"], "profiler": describe(way)}
    status = "complete"
    try:
        for number, cell in to_profile(run):
            run.cells[number] = {**run.cells[number], **profile_cell(folder, number, cell, way)}
            run.save("running")
    except KeyboardInterrupt:
        status = "cancelled"
    code = records.exit_code(run.cells, cancelled=status == "cancelled")
    document = run.save(status, code)
    records.emit(document, output_json)
    print_profile(document, to_stderr=output_json == "-")
    for reason in dict.fromkeys(cell["reason"] for cell in run.cells if cell["status"] == "profile_failed"):
        records.warn(reason)
    if status == "cancelled":
        records.warn(f"Stopped by Ctrl-C. What was measured and profiled is in '{folder}'.")
    raise typer.Exit(code)
