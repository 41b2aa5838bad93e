"""The three ways to profile a command: Nsight Systems, Nsight Compute, torch.profiler.

Each takes the command of the process to profile and OUTPUT, the common start of its files' names, and fails with one
line that says what is wrong and what to do. What the process and the tool printed is kept in OUTPUT.log.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from moira_cli.errors import ProfilerError
from moira_cli.traces import NCU_METRICS, read_chrome, read_ncu, read_nsys, summarize

# Without node-level tracing a CUDA graph is one record. The capture range keeps compilation, checks and warm-up out;
# its default end would also kill the process.
NSYS_FLAGS = (
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--cuda-graph-trace=node",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--export=sqlite",
    "--force-overwrite=true",
)
# ncu would lock the clocks to their base frequency; its default of flushing the caches before every kernel stays.
NCU_FLAGS = ("--clock-control", "none", "--profile-from-start", "off", "--force-overwrite")
INSTALL = {
    "nsys": "Install Nsight Systems (it comes with the CUDA toolkit), or use --torch.",
    "ncu": "Install Nsight Compute (it comes with the CUDA toolkit), or use --torch for times alone.",
}
NO_PERMISSION = (
    "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM). Run as root, start the container with "
    "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0. --nsys and --torch need no "
    "counters."
)


def require(tool: str) -> str:
    """The tool's path."""
    path = shutil.which(tool)
    if path is None:
        raise ProfilerError(f"{tool} is not on the PATH. {INSTALL[tool]}")
    return path


def tool_version(tool: str) -> str:
    """The last line of ``tool --version``."""
    done = subprocess.run([require(tool), "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or ["unknown"])[-1]


def _run(command: list[str], output: Path) -> subprocess.CompletedProcess:
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise ProfilerError(f"{command[0]} cannot be started: {error.strerror}.") from error
    Path(f"{output}.log").write_text(f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}", encoding="utf-8")
    return done


def _steps(done: subprocess.CompletedProcess, output: Path) -> dict[str, Any]:
    """What the profiled process wrote about itself; without it, it failed."""
    try:
        steps = json.loads(Path(f"{output}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        last = (said or ["it printed nothing"])[-1].strip().removeprefix("moira: ")
        raise ProfilerError(
            f"The profiled process failed (exit {done.returncode}): {last} See {output}.log."
        ) from error
    if "failed" in steps:
        raise ProfilerError(f"The profiled process failed: {steps['failed']}. See {output}.log.")
    return steps


def _summary(records, steps: dict[str, Any], untraced_us: float) -> dict[str, Any]:
    return summarize(records, steps["steps"], steps["layers"], steps["us"], untraced_us)


def with_nsys(child: list[str], output: Path, untraced_us: float, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Profile ``child`` with Nsight Systems; its report and export are kept."""
    command = [require("nsys"), "profile", *NSYS_FLAGS, *flags, f"--output={output}", *child]
    for suffix in (".json", ".nsys-rep", ".sqlite"):
        Path(f"{output}{suffix}").unlink(missing_ok=True)
    done = _run(command, output)
    steps = _steps(done, output)
    export = Path(f"{output}.sqlite")
    if not export.exists():
        report = Path(f"{output}.nsys-rep")
        what = "no SQLite export" if report.exists() else "no report: the capture range never opened"
        raise ProfilerError(f"nsys wrote {what}. See {output}.log, or use --torch. Command: {shlex.join(command)}")
    records, ranges = read_nsys(export)
    summary = _summary(records, steps, untraced_us)
    if not ranges:
        summary["notes"].append(
            "nsys recorded no NVTX range: nvtx is not installed, or nvtx 0.2.12 and newer meets nsys 2023.4 or older"
        )
    return {"way": "nsys", "command": shlex.join(command), "report": f"{output}.nsys-rep", **summary}


def with_torch(child: list[str], output: Path, untraced_us: float, device: str) -> dict[str, Any]:
    """Profile ``child`` with torch.profiler, which the child starts itself; the trace is kept."""
    trace = Path(f"{output}.trace.json.gz")
    for path in (trace, Path(f"{output}.json")):
        path.unlink(missing_ok=True)
    steps = _steps(_run(child, output), output)
    summary = _summary(read_chrome(trace, device), steps, untraced_us)
    return {"way": "torch", "command": shlex.join(child), "report": str(trace), **summary}


def with_ncu(child: list[str], output: Path) -> dict[str, Any]:
    """Profile ``child`` with Nsight Compute; its report is kept."""
    tool, report = require("ncu"), Path(f"{output}.ncu-rep")
    command = [tool, *NCU_FLAGS, "--metrics", ",".join(NCU_METRICS), "--export", str(output), *child]
    for path in (report, Path(f"{output}.json")):
        path.unlink(missing_ok=True)
    done = _run(command, output)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise ProfilerError(NO_PERMISSION)
    _steps(done, output)
    if not report.exists():
        raise ProfilerError(f"ncu wrote no report. See {output}.log. Command: {shlex.join(command)}")
    page = subprocess.run(
        [tool, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"],
        capture_output=True,
        text=True,
        check=False,
    )
    if page.returncode:
        raise ProfilerError(f"ncu cannot read its own report '{report}': {(page.stdout + page.stderr).strip()[:200]}")
    return {"way": "ncu", "command": shlex.join(command), "report": str(report), "kernels": read_ncu(page.stdout)}
