"""Timing: many samples of a pass over rotating buffers, their statistics, and a read-only kernel as the floor.

A pass is ``calls`` calls, each on the next of ``rotations`` sets of buffers; a sample is the time of one pass divided
by its calls. Passes are queued back to back with an event between them, so the GPU never waits for the host; in graph
mode a pass is one CUDA-graph replay. On a CPU a pass is one call and the clock is the wall clock.

L2 is cold by construction: between two uses of a buffer all other buffers are read, at least ``L2_MARGIN`` times the
L2's size. That holds only if a pass visits every rotation equally often, so anything else is refused.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from moira_kernels.ranges import annotate

L2_MARGIN = 5
MIN_CALLS_PER_PASS = 10
TARGET_PASS_US = 2000
MAX_CALLS_PER_PASS = 2000
MAX_SAMPLES = 1000
PASSES_PER_BATCH = 10
WARM_UP_TOLERANCE = 0.02
MAX_WARM_UP_S = 1.0


@dataclass(frozen=True)
class StopRule:
    """When to stop sampling: enough samples, enough time and a settled median; or too long."""

    min_samples: int
    min_time_ms: float
    max_noise_pct: float
    timeout_s: float


@dataclass(frozen=True)
class Samples:
    """Times per call in microseconds, in the order taken, and whether the median settled before the time ran out."""

    us: list[float]
    converged: bool

    def statistics(self) -> dict[str, float | list[float]]:
        """Median with its 95% bootstrap interval, spread, percentiles, and every sample."""
        ordered = np.array(self.us)
        q = {p: float(np.percentile(ordered, p)) for p in (10, 25, 75, 90, 99)}
        return {
            "median": float(np.median(ordered)),
            "ci95": list(median_interval(ordered)),
            "mean": float(ordered.mean()),
            "min": float(ordered.min()),
            "std": float(ordered.std()),
            "iqr": q[75] - q[25],
            "p10": q[10],
            "p90": q[90],
            "p99": q[99],
            "n": len(self.us),
            "samples": [round(us, 3) for us in self.us],
        }


def median_interval(values: np.ndarray, resamples: int = 1000) -> tuple[float, float]:
    """95% percentile-bootstrap interval of the median; the same for the same values."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (resamples, len(values))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


def noise_pct(values: list[float]) -> float:
    """Half width of the median's 95% interval, in percent of the median."""
    low, high = median_interval(np.array(values), resamples=200)
    return 100 * (high - low) / 2 / statistics.median(values)


def rotations_for_cold_l2(bytes_per_call: int, l2_bytes: int) -> int:
    """Sets of buffers so that at least L2_MARGIN x L2 is read between two uses of one set; at least two."""
    return max(2, math.ceil(L2_MARGIN * l2_bytes / bytes_per_call) + 1)


def calls_per_pass(rotations: int, call_us: float) -> int:
    """A multiple of ``rotations``: at least MIN_CALLS_PER_PASS calls, and about TARGET_PASS_US long."""
    wanted = min(MAX_CALLS_PER_PASS, max(MIN_CALLS_PER_PASS, math.ceil(TARGET_PASS_US / call_us)))
    return math.ceil(wanted / rotations) * rotations


class Timer(ABC):
    """Takes samples of ``call(i)``, which runs one call on buffer set i, for i = 0 .. rotations - 1."""

    def __init__(self, call: Callable[[int], None], rotations: int, calls: int):
        if calls % rotations:
            raise ValueError(f"calls: expected a multiple of rotations = {rotations}, got {calls}: L2 would be warm")
        self.call, self.rotations, self.calls = call, rotations, calls

    def one_pass(self) -> None:
        """Every call of a pass, launched one by one."""
        for i in range(self.calls):
            self.call(i % self.rotations)

    @abstractmethod
    def batch_us(self) -> list[float]:
        """Samples of a few passes."""

    def sample(self, rule: StopRule) -> Samples:
        """Warm up until two successive batches agree, then sample until ``rule`` is met."""
        start = time.perf_counter()
        previous = math.inf
        with annotate("warm-up"):
            while time.perf_counter() - start < min(MAX_WARM_UP_S, rule.timeout_s):
                current = statistics.median(self.batch_us())
                if abs(current - previous) <= WARM_UP_TOLERANCE * current:
                    break
                previous = current
        us: list[float] = []
        start = time.perf_counter()
        while True:
            with annotate("replays"):
                us += self.batch_us()
            elapsed = time.perf_counter() - start
            settled = (
                len(us) >= rule.min_samples
                and elapsed * 1e3 >= rule.min_time_ms
                and (noise_pct(us) <= rule.max_noise_pct)
            )
            if settled or elapsed >= rule.timeout_s or len(us) >= MAX_SAMPLES:
                return Samples(us, settled)


class WallTimer(Timer):
    """CPU: wall-clock time of each call."""

    def batch_us(self) -> list[float]:
        """One sample a call."""
        us = []
        for i in range(self.calls):
            start = time.perf_counter()
            self.call(i % self.rotations)
            us.append((time.perf_counter() - start) * 1e6)
        return us


class EagerTimer(Timer):
    """CUDA: passes launched call by call; includes whatever launch cost the GPU has to wait for."""

    def batch_us(self) -> list[float]:
        """One sample a pass."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(PASSES_PER_BATCH + 1)]
        events[0].record()
        for event in events[1:]:
            self.one_pass()
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) * 1e3 / self.calls for a, b in pairwise(events)]


class GraphTimer(EagerTimer):
    """CUDA: a pass is one replay of a graph that holds all its calls."""

    def __init__(self, call: Callable[[int], None], rotations: int, calls: int):
        super().__init__(call, rotations, calls)
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            super().one_pass()

    def one_pass(self) -> None:
        """Replay."""
        self.graph.replay()


def rough_us(call: Callable[[int], None], rotations: int) -> float:
    """A first guess of a call's time on the GPU, from a warmed-up eager pass."""
    timer = EagerTimer(call, rotations, rotations)
    timer.batch_us()
    return statistics.median(timer.batch_us())


@triton.jit
def _read_kernel(data_ptr, sink_ptr, num_words, BLOCK: tl.constexpr):
    """Read num_words int32 words with a grid-stride loop and keep one word per program."""
    offset = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, num_words, step):
        acc ^= tl.load(data_ptr + first.to(tl.int64) + offset, mask=first + offset < num_words, other=0)
    tl.store(sink_ptr + tl.program_id(0), tl.xor_sum(acc, 0))


READ_SHAPES = tuple((per_sm, block) for per_sm in (2, 4, 8) for block in (2048, 4096, 8192))
"""Launch shapes tried by ``read_floor_us``: thread blocks per multiprocessor, words per iteration."""


def read_floor_us(num_bytes: int, device: torch.device) -> float:
    """Time of a kernel that only reads ``num_bytes`` contiguous bytes, cold L2, best of READ_SHAPES, in a CUDA graph.

    The fair floor of an attention kernel that has to read as much: short reads cannot reach the rate of long ones.
    """
    properties = torch.cuda.get_device_properties(device)
    rotations = rotations_for_cold_l2(num_bytes, properties.L2_cache_size)
    num_words = num_bytes // 4
    buffers = torch.randint(-(2**31), 2**31, (rotations, num_words), dtype=torch.int32, device=device)
    best = math.inf
    for per_sm, block in READ_SHAPES:
        programs = min(per_sm * properties.multi_processor_count, triton.cdiv(num_words, block))
        sink = torch.empty(programs, dtype=torch.int32, device=device)

        def call(i: int, programs: int = programs, block: int = block, sink: torch.Tensor = sink) -> None:
            _read_kernel[(programs,)](buffers[i], sink, num_words, BLOCK=block, num_warps=8)

        timer = GraphTimer(call, rotations, calls_per_pass(rotations, rough_us(call, rotations)))
        best = min(best, statistics.median(timer.sample(StopRule(30, 20, 1.0, 0.5)).us))
    return best
