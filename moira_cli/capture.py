"""One cell of a measured run under a profiler: the process that `moira profile` starts.

    python -m moira_cli.capture RUN CELL nsys|ncu|torch OUTPUT

CELL counts from 0 in the run's cells. The cell is built and planned as it was when it was measured and warmed up; then
one batch of its passes (ncu: a few plain calls) runs between cudaProfilerStart and cudaProfilerStop, or inside
torch.profiler, whose trace goes to OUTPUT.trace.json.gz. OUTPUT.json gets the number of steps, the layers of a step and
the microseconds of a step, a sample a pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from moira_cli import harness
from moira_cli.bench_kernel import Config, build_cells, build_points
from moira_cli.compare import load_run
from moira_cli.records import dumps, write_atomically
from moira_cli.timing import PASSES_PER_BATCH, Timer, WallTimer
from moira_kernels.ranges import annotate

NCU_CALLS = 3
"""Calls that Nsight Compute sees: it runs every kernel many times over, with the caches flushed before each."""


@contextmanager
def profiler_range(device: torch.device) -> Iterator[None]:
    """Opens and closes the capture range of nsys and ncu."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


@contextmanager
def torch_trace(device: torch.device, path: Path) -> Iterator[None]:
    """Writes torch.profiler's trace: CUPTI's records of the GPU, or the operators on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def passes(timer: Timer) -> tuple[int, list[float]]:
    """(calls, microseconds of a call in each sample) of at least a batch of passes."""
    us: list[float] = []
    while len(us) < PASSES_PER_BATCH:
        us += timer.batch_us()
    return len(us) * (1 if isinstance(timer, WallTimer) else timer.calls), us


def capture(run: Path, number: int, way: str, output: Path) -> None:
    """Build the cell and run it under the profiler."""
    document = load_run(run)
    config, measured = Config(**document["config_resolved"]), document["cells"][number]
    device = torch.device(config.device)
    cell = build_cells(config, build_points(config, device))[number]
    case = harness.build_case(cell.point, device)
    if isinstance(case, str):
        raise SystemExit(f"moira: {case}")
    mode = "eager" if way == "ncu" else cell.mode
    timer = harness.captured(case, cell.arm, mode, measured["timing"]["l2"]["calls_per_pass"])
    name = f"replays/{cell.arm}/{cell.point.label}"
    if way == "ncu":
        steps, us = NCU_CALLS, []
        with profiler_range(device), annotate(name):
            for i in range(steps):
                timer.call(i % timer.rotations)
    else:
        timer.batch_us()
        trace = torch_trace(device, Path(f"{output}.trace.json.gz")) if way == "torch" else profiler_range(device)
        with trace, annotate(name):
            steps, us = passes(timer)
    write_atomically(Path(f"{output}.json"), dumps({"steps": steps, "layers": 1, "us": us}))


if __name__ == "__main__":
    capture(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
