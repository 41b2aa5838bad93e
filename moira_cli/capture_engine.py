"""Decode steps of one engine under a profiler: the process that `moira profile e2e` starts for an arm and a shape.

    python -m moira_cli.capture_engine SPEC.json SHAPE nsys|torch OUTPUT

SPEC.json is what `moira bench e2e` kept of the engine (``moira_cli.serving.Spec``), SHAPE the label of one of its
shapes. The engine prefills and warms up as it did when it was measured and decodes once; steps in the middle run
between cudaProfilerStart and cudaProfilerStop, or inside torch.profiler, whose trace goes to OUTPUT.trace.json.gz.
OUTPUT.json gets the number of steps, the layers of a step and the mean microseconds of a step, or under ``failed`` why
there are none.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from moira_cli.capture import profiler_range, torch_trace
from moira_cli.e2e_cells import judge
from moira_cli.records import dumps, write_atomically
from moira_cli.serving_child import Bench, StepLog, set_environment, start_engine
from moira_kernels.ranges import annotate

STEPS = 32
"""Most steps of a trace: enough for medians, few enough to be read quickly."""


class Window(StepLog):
    """Has the profiler on for ``count`` steps in the middle of a repetition of ``tokens`` tokens.

    The engine may look ahead: when it reports a step, the next one is launched already. So the device is left to finish
    at both ends, and between them run as many whole steps as are reported.
    """

    def __init__(self, tokens: int, batch: int, profiler: Callable[[], AbstractContextManager]):
        super().__init__()
        self.count = min(STEPS, (tokens - 1) // 2)
        self.first = (tokens - 1 - self.count) // 2
        self.batch, self.profiler = batch, profiler
        self.us: float | None = None
        self._opened: ExitStack | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, **more: Any) -> None:
        """Called by vLLM after each step."""
        before = len(self.steps)
        super().record(scheduler_stats, iteration_stats, **more)
        if len(self.steps) == before or self.us is not None:
            return
        if self._opened is None:
            if self._decoded() == self.first:
                self._open()
        elif len(self.steps) == self._last:
            self._close()

    def _decoded(self) -> int:
        """Steps on end, up to the latest, in which all requests decoded."""
        return sum(1 for _ in takewhile(lambda step: step.tokens == self.batch, reversed(self.steps)))

    def _open(self) -> None:
        _finish()
        self._last = len(self.steps) + self.count
        self._opened = ExitStack()
        self._opened.enter_context(self.profiler())
        self._start = time.perf_counter()

    def _close(self) -> None:
        _finish()
        seconds = time.perf_counter() - self._start
        self._opened.close()
        if self._decoded() < self.first + self.count:
            raise ValueError("requests joined or left in the profiled steps")
        self.us = 1e6 * seconds / self.count


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class ProfiledBench(Bench):
    """Measures a shape with the profiler on in the middle of its repetition."""

    def __init__(self, llm: Any, spec: dict[str, Any], profiler: Callable[[], AbstractContextManager]):
        super().__init__(llm, {**spec, "repetitions": 1}, lambda event, **fields: print(event, fields, flush=True))
        self.profiler = profiler

    def repetition(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Decode once."""
        self.window = Window(self.spec["tokens"], len(prompts), self.profiler)
        self.llm.llm_engine.logger_manager.stat_loggers.append(self.window)
        return super().repetition(prompts)


def capture(spec: dict[str, Any], label: str, way: str, output: Path) -> dict[str, Any]:
    """What OUTPUT.json gets; the trace is written on the way."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @contextmanager
    def profiler() -> Iterator[None]:
        trace = torch_trace(device, Path(f"{output}.trace.json.gz")) if way == "torch" else profiler_range(device)
        with trace, annotate(f"steps/{spec['arm']}/{label}"):
            yield

    shape = next(shape for shape in spec["shapes"] if shape["label"] == label)
    bench = ProfiledBench(start_engine(spec), spec, profiler)
    result = bench.measure(shape)
    if reason := judge(result, bench.spec, shape):
        raise ValueError(reason)
    if bench.window.us is None:
        raise ValueError(f"all {shape['batch']} requests decoded together in too few steps to profile")
    network = json.loads((Path(spec["model"]) / "config.json").read_text(encoding="utf-8"))
    bench.llm.llm_engine.engine_core.shutdown()
    return {"steps": bench.window.count, "layers": network["num_hidden_layers"], "us": [bench.window.us]}


def main() -> None:
    """Profile what the command line names."""
    spec_path, label, way, output = sys.argv[1:]
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    set_environment(spec)
    # nsys follows processes that are spawned, not those that are forked.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    try:
        written = capture(spec, label, way, Path(output))
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).strip().splitlines() or [""])[0]
        written = {"failed": f"{type(error).__name__}: {reason}"}
    write_atomically(Path(f"{output}.json"), dumps(written))
    raise SystemExit("failed" in written)


if __name__ == "__main__":
    main()
