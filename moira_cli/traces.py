"""Traces of a step: read the records of Nsight Systems, Nsight Compute and torch.profiler, and add them up by stage.

Nsight Systems: its own SQLite export, as documented for 2023.4 and unchanged in the columns read here since 2022.4;
tables are there only if they have rows, times are integer nanoseconds:

    CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET   start, end, deviceId, streamId; KERNEL: demangledName, a StringIds.id
    CUPTI_ACTIVITY_KIND_GRAPH_TRACE                a row per launch of a CUDA graph that was traced as a whole
    NVTX_EVENTS                                    eventType 75 names a domain (text, domainId), 59 is a push/pop range

torch.profiler: the Chrome trace, events of category kernel, gpu_memcpy and gpu_memset (CPU: cpu_op) in microseconds.
Nsight Compute: the raw page as CSV, a header, a line of units, a line per kernel launch.
"""

from __future__ import annotations

import csv
import gzip
import json
import sqlite3
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moira_cli.errors import ProfilerError
from moira_cli.stages import STAGES, UNCLASSIFIED, classify

UNCLASSIFIED_LIMIT_PCT = 2.0
BUSY_OVER_STEP = (1 / 200, 4)
"""A step's kernels cannot take many times the step, nor next to nothing of it: outside, the unit is another one."""


@dataclass(frozen=True)
class Record:
    """One kernel, copy or (CPU) operator: its name and when it ran, in nanoseconds of the trace's own clock."""

    name: str
    start: float
    end: float
    device: int
    stream: int


def read_nsys(path: Path) -> tuple[list[Record], int]:
    """(device records in order of start, number of push/pop ranges in the domain moira) of an SQLite export."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            kind = "CUPTI_ACTIVITY_KIND_"
            if f"{kind}GRAPH_TRACE" in tables:
                (graphs,) = database.execute(f"SELECT count(*) FROM {kind}GRAPH_TRACE").fetchone()
                if graphs:
                    raise ProfilerError(
                        f"nsys recorded {graphs} CUDA graphs as a whole instead of their kernels: "
                        "--cuda-graph-trace=node had no effect. Use --torch, or another version of nsys."
                    )
            rows: list[tuple] = []
            if f"{kind}KERNEL" in tables:
                rows += database.execute(
                    "SELECT coalesce(value, 'kernel without a name'), start, end, deviceId, streamId "
                    f"FROM {kind}KERNEL LEFT JOIN StringIds ON StringIds.id = demangledName"
                )
            if not rows:
                raise ProfilerError(
                    "nsys recorded no CUDA kernels. Usual causes: the capture range never opened, a worker process was "
                    "forked (set VLLM_WORKER_MULTIPROC_METHOD=spawn), or another profiler holds the GPU. Try --torch."
                )
            for table, name in (("MEMCPY", "[memcpy]"), ("MEMSET", "[memset]")):
                if kind + table in tables:
                    rows += database.execute(f"SELECT '{name}', start, end, deviceId, streamId FROM {kind}{table}")
            ranges = 0
            if "NVTX_EVENTS" in tables:
                (ranges,) = database.execute(
                    "SELECT count(*) FROM NVTX_EVENTS WHERE eventType = 59 AND domainId IN "
                    "(SELECT domainId FROM NVTX_EVENTS WHERE eventType = 75 AND text = 'moira')"
                ).fetchone()
    except sqlite3.Error as error:
        raise ProfilerError(
            f"The export '{path}' cannot be read: {error}. Keep the report and export again."
        ) from error
    return sorted((Record(*row) for row in rows), key=lambda record: record.start), ranges


def read_chrome(path: Path, device: str) -> list[Record]:
    """Device records ('cuda'), or the outermost operators ('cpu'), of a torch.profiler trace, in order of start."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProfilerError(f"The trace '{path}' cannot be read: {error}.") from error
    names = {"gpu_memcpy": "[memcpy]", "gpu_memset": "[memset]"}
    wanted = {"kernel", *names} if device == "cuda" else {"cpu_op"}
    records = [
        Record(
            names.get(event["cat"], event["name"]),
            1e3 * event["ts"],
            1e3 * (event["ts"] + event["dur"]),
            event["args"].get("device", 0),
            event["args"].get("stream", event["tid"]),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in wanted
    ]
    if not records:
        raise ProfilerError(
            "torch.profiler brought back no CUDA kernels: another profiler holds the GPU's records (CUPTI serves one "
            "at a time), or libcupti is missing. Run without nsys or ncu around this command."
            if device == "cuda"
            else "torch.profiler brought back no operators."
        )
    records.sort(key=lambda record: (record.start, -record.end))
    return records if device == "cuda" else list(_outermost(records))


def _outermost(records: Iterable[Record]) -> Iterable[Record]:
    """Records of each thread that lie in no other."""
    ends: dict[int, float] = {}
    for record in records:
        if record.end > ends.get(record.stream, 0):
            ends[record.stream] = record.end
            yield record


def summarize(
    records: list[Record], steps: int, layers: int, traced: list[float], untraced_us: float
) -> dict[str, Any]:
    """Where a step's time goes.

    Args:
        records: everything that ran in ``steps`` equal steps, in order of start.
        steps: how many.
        layers: decode layers of a step (1 where a step is one layer's attention).
        traced: microseconds of a step under the profiler, samples that together cover the steps.
        untraced_us: the step's time without it.

    Returns:
        ``stages``: microseconds per step and stage; ``kernels``: the same by name with calls per step; ``traced_us``,
        ``overhead_pct``: over the untraced step; ``busy_us``: with anything running; ``gaps_us``: with nothing;
        ``uneven``: names whose number is no multiple of the steps; ``timeline``: one layer's records; ``notes``: what a
        reader must know. Times are medians over steps (a stage: the sum of its kernels' medians), busy and gaps means.
    """
    notes = []
    by_device = defaultdict(list)
    for record in records:
        by_device[record.device].append(record)
    if len(by_device) > 1:
        device = max(by_device, key=lambda d: sum(r.end - r.start for r in by_device[d]))
        notes.append(
            f"records of GPUs {', '.join(map(str, sorted(by_device)))}: only GPU {device}, the busiest, is shown"
        )
        records = by_device[device]
    busy_us = _union(records) / steps / 1e3
    traced_us, mean_us = statistics.median(traced), statistics.fmean(traced)
    low, high = (factor * mean_us for factor in BUSY_OVER_STEP)
    if any(record.end < record.start for record in records) or not low < busy_us < high:
        raise ProfilerError(
            f"The trace's times cannot be nanoseconds: its records make {busy_us:.4g} us a step, and the profiled step "
            f"took {mean_us:.4g} us. Was the file exported by another tool?"
        )
    by_name = defaultdict(list)
    for record in records:
        by_name[record.name].append((record.end - record.start) / 1e3)
    kernels, uneven = [], {}
    for name, times in by_name.items():
        calls = len(times) / steps
        if len(times) % steps:
            uneven[name] = len(times)
            us = sum(times) / steps
        else:
            each = int(calls)
            us = statistics.median(sum(times[i * each : (i + 1) * each]) for i in range(steps))
        kernels.append({"name": name, "stage": classify(name), "us": us, "calls": calls})
    kernels.sort(key=lambda kernel: (STAGES.index(kernel["stage"]), -kernel["us"]))
    total = sum(kernel["us"] for kernel in kernels)
    stages = dict.fromkeys(STAGES, 0.0)
    for kernel in kernels:
        kernel["share_pct"] = 100 * kernel["us"] / total
        stages[kernel["stage"]] += kernel["us"]
    if total > 1.02 * busy_us:
        notes.append(f"kernels overlap by {total - busy_us:.1f} us: one that starts early waits within its own time")
    unknown_pct = 100 * stages[UNCLASSIFIED] / total
    if traced_us < 0.95 * untraced_us:
        notes.append("faster than without the profiler: the machine was busier while it was measured")
    if unknown_pct > UNCLASSIFIED_LIMIT_PCT:
        names = ", ".join(kernel["name"][:60] for kernel in kernels if kernel["stage"] == UNCLASSIFIED)
        notes.append(f"{unknown_pct:.1f}% of the kernel time is unclassified: {names}")
    return {
        "steps": steps,
        "layers": layers,
        "stages": stages,
        "kernels": kernels,
        "unclassified_pct": unknown_pct,
        "busy_us": busy_us,
        "gaps_us": mean_us - busy_us,
        "traced_us": traced_us,
        "untraced_us": untraced_us,
        "overhead_pct": 100 * (traced_us / untraced_us - 1),
        "uneven": uneven,
        "timeline": _one_layer(records, steps * layers),
        "notes": notes,
    }


def _union(records: Iterable[Record]) -> float:
    """Nanoseconds in which at least one of the records (in order of start) ran."""
    total, end = 0.0, float("-inf")
    for record in records:
        total += max(0.0, record.end - max(record.start, end))
        end = max(end, record.end)
    return total


def _one_layer(records: list[Record], repeats: int) -> list[dict[str, Any]]:
    """The records of one layer in the middle of the trace.

    If the trace is one sequence of names ``repeats`` times over, that sequence; else (a step has more than its layers)
    from one launch of the first kernel that runs ``repeats`` times to its next. Empty if there is no such kernel.
    """
    names = [record.name for record in records]
    length, middle = len(names) // repeats, repeats // 2
    if names == names[:length] * repeats:
        chosen = records[middle * length : (middle + 1) * length]
    else:
        counts = Counter(names)
        once = next((name for name in counts if counts[name] == repeats), None)
        starts = [index for index, name in enumerate(names) if name == once]
        chosen = records[starts[middle] : [*starts, None][middle + 1]] if starts else []
    return [
        {
            "name": record.name,
            "stage": classify(record.name),
            "start_us": (record.start - chosen[0].start) / 1e3,
            "us": (record.end - record.start) / 1e3,
            "stream": record.stream,
        }
        for record in chosen
    ]


NCU_METRICS = {
    "gpu__time_duration.sum": ("ns", "nsecond"),
    "dram__bytes.sum.per_second": ("byte/s", "byte/second"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%",),
    "launch__registers_per_thread": ("register/thread", ""),
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": ("byte",),
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": ("byte",),
}
"""What is asked of Nsight Compute, with the units it may come in. Local memory holds spilled registers."""


def read_ncu(text: str) -> list[dict[str, Any]]:
    """Per kernel, medians over launches: us, DRAM TB/s, occupancy in %, registers a thread, bytes of local memory."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    if len(rows) < 2:
        raise ProfilerError("ncu recorded no kernels. Is the device idle, and ncu new enough for this GPU and driver?")
    units, *launches = rows
    for metric, known in NCU_METRICS.items():
        if metric not in units:
            raise ProfilerError(f"ncu's report has no {metric}: this GPU or version does not count it.")
        if units[metric] not in known:
            raise ProfilerError(f"ncu reports {metric} in '{units[metric]}', expected {known[0]}.")
    by_name = defaultdict(list)
    for launch in launches:
        values = []
        for metric in NCU_METRICS:
            try:
                values.append(float(launch[metric].replace(",", "")))
            except ValueError as error:
                raise ProfilerError(f"ncu has no {metric} for {launch['Kernel Name']}: '{launch[metric]}'.") from error
        by_name[launch["Kernel Name"]].append(values)
    kernels = []
    for name, values in by_name.items():
        ns, bytes_per_s, occupancy, registers, loads, stores = map(statistics.median, zip(*values, strict=True))
        kernels.append(
            {
                "name": name,
                "stage": classify(name),
                "launches": len(values),
                "us": ns / 1e3,
                "dram_tbps": bytes_per_s / 1e12,
                "occupancy_pct": occupancy,
                "registers": int(registers),
                "local_bytes": int(loads + stores),
            }
        )
    return sorted(kernels, key=lambda kernel: (STAGES.index(kernel["stage"]), -kernel["us"]))
