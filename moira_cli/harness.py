"""One cell of `moira bench kernel`: build the case, check the arm against float32, plan, capture, time.

A **point** is what all arms share: shape, geometry, layout, lists. It is built once as a set of identical-looking
buffer sets (rotations) with the same page counts at different places, so that no call finds its data in the L2.
"""

from __future__ import annotations

import hashlib
import statistics
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

import baselines
from baselines import page_sets
from moira_cli import environment, timing
from moira_cli.lists import Lists
from moira_cli.shapes import Shape
from moira_kernels import MoiraError, attention, selection
from moira_kernels.layout import PagedKV, RaggedPages
from moira_kernels.ranges import annotate
from moira_kernels.testing import Geometry, make_case, max_abs_error, tolerance, useful_bytes

GIB = 1024**3
NOISE_FLAG_PCT = 2.0


@dataclass(frozen=True)
class Point:
    """Everything about a measurement but the arm and the mode.

    Attributes:
        kv_layout: 'nhd' or 'hnd'.
        lists: page counts of every row and where they come from.
        l2: 'cold' (rotating buffers), 'warm' (one set of buffers) or 'uncontrolled' (CPU).
    """

    shape: Shape
    geometry: Geometry
    page_size: int
    kv_layout: str
    lists: Lists
    seed: int
    l2: str

    @property
    def pages_per_row(self) -> int:
        """Pages of each request."""
        return self.lists.pages

    @property
    def useful_bytes(self) -> int:
        """Bytes of the listed keys and values in bf16, from the counts (the device counts again when it runs)."""
        short = self.pages_per_row * self.page_size - self.shape.context_tokens
        tokens = int(self.lists.counts.sum()) * self.page_size - short * self.lists.counts.size
        return tokens * 2 * self.geometry.head_dim * 2

    @property
    def copy_bytes(self) -> int:
        """Bytes of one buffer set: the whole KV cache, page lists, queries and outputs."""
        pages = self.shape.batch * self.pages_per_row + 1
        g = self.geometry
        cache = pages * self.page_size * g.num_kv_heads * 2 * g.head_dim * 2
        lists = self.shape.batch * g.num_kv_heads * self.pages_per_row * 4
        return cache + lists + 2 * self.shape.batch * g.num_q_heads * g.head_dim * 2

    def rotations(self, l2_bytes: int) -> int:
        """Buffer sets needed."""
        return timing.rotations_for_cold_l2(self.useful_bytes, l2_bytes) if self.l2 == "cold" else 1

    @property
    def label(self) -> str:
        """Shape, layout and spread, for names in a profiler."""
        return f"{self.shape.label}/{self.kv_layout}/cv={self.lists.describe()['cv_measured']:.2f}"

    def describe(self) -> dict[str, Any]:
        """What identifies the point in a result."""
        return {
            "shape": {
                "alias": self.shape.label,
                "ctx_tokens": self.shape.context_tokens,
                "batch": self.shape.batch,
                "rows": self.shape.batch * self.geometry.num_kv_heads,
                "pages_per_row": self.pages_per_row,
                "page_size": self.page_size,
            },
            "geometry": asdict(self.geometry),
            "kv_layout": self.kv_layout,
            "dtype": "bfloat16",
            "kv_source": "normal",
            **self.lists.describe(),
            "seed": self.seed,
            "l2_policy": self.l2,
        }


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def l2_bytes(device: torch.device) -> int:
    """Size of the last cache before memory; 0 on a CPU, where it is not controlled."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def memory_shortage(point: Point, device: torch.device) -> str | None:
    """One line if the buffer sets of ``point`` do not fit, else None."""
    copies = point.rotations(l2_bytes(device))
    # The float32 reference and the arms' scratch come on top: a tenth, and never less than 256 MiB. On a GPU so do the
    # buffers of the read floor.
    need = copies * point.copy_bytes
    need += max(need // 10, 256 * 1024**2)
    if device.type == "cuda":
        need += timing.rotations_for_cold_l2(point.useful_bytes, l2_bytes(device)) * point.useful_bytes
    free = free_bytes(device)
    if need <= free:
        return None
    advice = "a smaller shape" + (", or --l2 warm (1 copy)" if copies > 1 else "")
    return (
        f"{point.shape.label} needs {point.copy_bytes / GIB:.1f} GiB per KV copy x {copies} "
        f"{'copy' if copies == 1 else 'copies'} + scratch = {need / GIB:.1f} GiB; {free / GIB:.1f} GiB is free on "
        f"{device.type}. Use {advice}."
    )


def build_case(point: Point, device: torch.device) -> Case | str:
    """The point with its buffers, or one line that says why they do not fit."""
    shortage = memory_shortage(point, device)
    if shortage is not None:
        return shortage
    try:
        return Case(point, device)
    except torch.OutOfMemoryError as error:
        return f"{point.shape.label}: out of memory while its buffers were made: {str(error).splitlines()[0]}"


class Case:
    """A point with its buffers on the device."""

    def __init__(self, point: Point, device: torch.device):
        self.point, self.device = point, device
        self._expected: dict[tuple[int, str], tuple[torch.Tensor, float]] = {}
        self.sets = [self._buffers(i) for i in range(point.rotations(l2_bytes(device)))]

    def _buffers(self, index: int) -> tuple[torch.Tensor, PagedKV, RaggedPages]:
        point = self.point
        q, kv = make_case(
            [point.shape.context_tokens] * point.shape.batch,
            point.geometry,
            page_size=point.page_size,
            layout=point.kv_layout,
            device=self.device,
            seed=point.seed + index,
        )
        keep = torch.from_numpy(point.lists.keep(index)).to(self.device)
        return q, kv, selection.compact(keep, kv)

    @cached_property
    def useful_bytes(self) -> int:
        """Bytes of the listed keys and values of one call, counted from the lists on the device."""
        return useful_bytes(self.sets[0][1], self.sets[0][2])

    def expected(self, index: int, lists: RaggedPages) -> tuple[torch.Tensor, float]:
        """(float32 output, tolerance) for the queries and cache of buffer set ``index`` over ``lists``.

        Kept by what the lists say: most arms ask for the same.
        """
        key = index, _digest(lists)
        if key not in self._expected:
            q, kv, _ = self.sets[index]
            truth = attention.reference(q, kv, lists)[0]
            low = attention.reference(q, kv, lists, dtype=kv.k.dtype)[0]
            self._expected[key] = truth, tolerance(truth, low)
        return self._expected[key]

    @cached_property
    def read_us(self) -> float | None:
        """Floor: time to only read the useful bytes. None on a CPU."""
        return timing.read_floor_us(self.useful_bytes, self.device) if self.device.type == "cuda" else None


def _digest(lists: RaggedPages) -> str:
    """SHA-256 of the listed ids and the lengths; entries past a row's length do not count."""
    column = torch.arange(lists.page_ids.shape[2], device=lists.page_ids.device)
    ids = torch.where(column < lists.lengths[..., None], lists.page_ids, -1)
    digest = hashlib.sha256()
    for tensor in (ids, lists.lengths, lists.last_page_len):
        digest.update(f"{tuple(tensor.shape)}".encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


class Failure(Exception):
    """A cell that did not become a number: its status and the reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


def measure(case: Case, arm_name: str, mode: str, rule: timing.StopRule, check: bool) -> dict[str, Any]:
    """Check and time one arm. Returns the cell's measured part: status, and either figures or a reason."""
    try:
        with annotate(f"bench/{arm_name}/{case.point.label}"):
            return _measure(case, arm_name, mode, rule, check)
    except Failure as failure:
        return {"status": failure.status, "reason": failure.reason}
    except torch.OutOfMemoryError as error:
        return {"status": "oom", "reason": f"{arm_name}: out of memory: {str(error).splitlines()[0]}"}
    except MoiraError as error:
        return {"status": "skipped_unsupported", "reason": f"{arm_name}: {error}"}
    except Exception as error:  # a broken arm is a row with a reason, and the others go on
        reason = f"{arm_name}: {type(error).__name__}: {error}".splitlines()[0]
        return {"status": "error", "reason": reason, "traceback": traceback.format_exc()}


def _measure(case: Case, arm_name: str, mode: str, rule: timing.StopRule, check: bool) -> dict[str, Any]:
    on_gpu = case.device.type == "cuda"
    health_before = environment.gpu_state(case.device.index) if on_gpu else {}
    arm_class = baselines.load(arm_name)
    _require_memory(case, arm_name, arm_class)
    arms = [arm_class(*buffers) for buffers in case.sets]
    with annotate("plan"):
        plan = _median_plan(arms)
    for arm in arms:
        arm.run()
    eager = [arm.out.clone() for arm in arms]
    result: dict[str, Any] = {"check": {"reference": None}}
    if check:
        with annotate("check"):
            result["check"] = _check(case, arms, eager)

    def call(i: int) -> None:
        arms[i].run()

    timer = _timer(call, len(arms), mode, on_gpu)
    if check and isinstance(timer, timing.GraphTimer):
        _check_replay(arm_name, arms, eager, timer)
        result["check"]["graph_equals_eager"] = True
    samples = timer.sample(rule)
    kernel = samples.statistics()
    total = kernel["median"] + sum(plan.values())
    moved = arms[0].moved_bytes()
    partition = arms[0].partition()
    health_after = environment.gpu_state(case.device.index) if on_gpu else {}
    flags = _flags(case, arms[0], mode, samples, kernel, (health_before, health_after))
    return {
        "status": "ok",
        "implementation": arms[0].implementation,
        **result,
        "timing": {
            "timer": {"GraphTimer": "graph", "EagerTimer": "event", "WallTimer": "wall"}[type(timer).__name__],
            "mode": mode,
            "l2": {
                "policy": case.point.l2,
                "rotations": len(arms),
                "calls_per_pass": timer.calls,
                "bytes_between_reuse": (len(arms) - 1) * case.useful_bytes,
                "l2_bytes": l2_bytes(case.device),
            },
            ("kernel_us" if on_gpu else "cpu_us"): kernel,
            "plan": {"scope": "layer", "capturable": arms[0].graph_safe, **plan},
            "total_us": total,
            "converged": samples.converged,
        },
        "work": {
            "useful_bytes": case.useful_bytes,
            "moved_bytes": moved,
            "thread_blocks": None if partition is None else partition.report(),
            "useful_tbps": case.useful_bytes / kernel["median"] / 1e6,
            "moved_tbps": moved / kernel["median"] / 1e6,
            "read_us": case.read_us,
            "read_source": "measured: a kernel that only reads the useful bytes, same run" if on_gpu else None,
            "sol_pct": None if case.read_us is None else 100 * case.read_us / kernel["median"],
        },
        "health": {"before": health_before, "after": health_after},
        "flags": flags,
    }


def captured(case: Case, arm_name: str, mode: str, calls: int) -> timing.Timer:
    """The timer of a measured cell again, ready for a profiler: planned, run once, ``calls`` calls a pass."""
    arms = [baselines.load(arm_name)(*buffers) for buffers in case.sets]
    for arm in arms:
        arm.plan()
        arm.run()
    return _timer(lambda i: arms[i].run(), len(arms), mode, case.device.type == "cuda", calls)


def _require_memory(case: Case, name: str, arm_class: type[baselines.Attention]) -> None:
    """Fail before the arm takes memory that is not there: on a CPU the system would kill the process instead."""
    need, free = arm_class.extra_caches * case.point.copy_bytes, free_bytes(case.device)
    if need > free:
        raise Failure(
            "oom",
            f"{name} needs {need / GIB:.1f} GiB more for {case.point.shape.label}; {free / GIB:.1f} GiB is free on "
            f"{case.device.type}. Use a smaller shape, or leave the arm out with --arms.",
        )


def _median_plan(arms: list[baselines.Attention], repeats: int = 5) -> dict[str, float]:
    """Median microseconds of each part of the host plan; every arm is planned at least once."""
    for arm in arms:
        arm.plan()
    parts = []
    for _ in range(repeats):
        if arms[0].q.is_cuda:
            torch.cuda.synchronize()  # a copy to the host must not wait for the last plan's device work
        parts.append(arms[0].plan())
    return {name: statistics.median(part[name] for part in parts) for name in parts[0]}


def _check(case: Case, arms: list[baselines.Attention], outputs: list[torch.Tensor]) -> dict[str, Any]:
    """Compare the first and the last buffer set with the float32 reference over the lists that the arm attended."""
    worst, limit = 0.0, float("inf")
    for index in sorted({0, len(arms) - 1}):
        attended = arms[index].attended()
        if missed := page_sets.missed(attended, *case.sets[index][1:]):
            raise Failure("wrong_result", f"wrong result: the arm's own lists miss {missed:,} of the listed pages.")
        truth, allowed = case.expected(index, attended)
        error = max_abs_error(outputs[index], truth)
        if not error <= allowed:
            raise Failure(
                "wrong_result",
                f"wrong result: the output differs from the float32 reference by {error:.3g} (limit {allowed:.3g}). "
                "Its time is not ranked.",
            )
        worst, limit = max(worst, error), min(limit, allowed)
    return {"reference": "float32 PyTorch", "max_abs": worst, "limit": limit}


def _timer(
    call: Callable[[int], None], rotations: int, mode: str, on_gpu: bool, calls: int | None = None
) -> timing.Timer:
    if not on_gpu:
        return timing.WallTimer(call, rotations, rotations)
    calls = calls or timing.calls_per_pass(rotations, timing.rough_us(call, rotations))
    if mode == "eager":
        return timing.EagerTimer(call, rotations, calls)
    try:
        return timing.GraphTimer(call, rotations, calls)
    except Exception as error:
        torch.cuda.synchronize()
        raise Failure("capture_failed", f"CUDA-graph capture failed: {str(error).splitlines()[0]}") from error


def _check_replay(
    name: str, arms: list[baselines.Attention], eager: list[torch.Tensor], timer: timing.GraphTimer
) -> None:
    """A replay into poisoned outputs must give the eager outputs bit for bit."""
    for arm in arms:
        arm.out.fill_(float("nan"))
    timer.one_pass()
    torch.cuda.synchronize()
    for arm, want in zip(arms, eager, strict=True):
        if not torch.equal(arm.out, want):
            raise Failure("wrong_result", f"wrong result: {name} in a CUDA graph differs from its eager run.")


def _flags(case, arm, mode, samples, kernel, health) -> list[str]:
    flags = []
    if kernel["iqr"] > NOISE_FLAG_PCT / 100 * kernel["median"]:
        flags.append("N")
    if any(int(state.get("throttle_reasons") or 0) & environment.THROTTLE_BITS for state in health):
        flags.append("T")
    if case.point.l2 == "warm":
        flags.append("W")
    if mode == "eager" and case.device.type == "cuda":
        flags.append("E")
    if not arm.graph_safe:
        flags.append("P")
    if not samples.converged:
        flags.append("U")
    return flags
