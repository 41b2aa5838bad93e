"""Cells of `moira bench e2e`: a shape's raw measurements judged and summed up, and launches put together.

Besides the usual ones a status can be invalid (measured, but not under the conditions that it claims: the figures stay
in the cell and out of the tables) or timeout (the engine was silent for too long).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from moira_cli.environment import THROTTLE_BITS

TPOT_METHODS = {
    "request_timestamps": (
        "(last - first token) / (tokens - 1) per request by the engine's clock, prompts from the prefix cache; median "
        "over requests"
    ),
    "engine_step": "mean time between the engine's steps in which all requests decode",
    "cpu_wall": "wall-clock time of a decode step on the CPU",
}
"""How a TPOT was measured."""


def judge(result: dict[str, Any], spec: dict[str, Any], shape: dict[str, Any]) -> str | None:
    """Why raw measurements of a shape are not what they should be, or None."""
    repetitions, tokens, batch = result["repetitions"], spec["tokens"], shape["batch"]
    if preempted := sum(r["preemptions"] for r in repetitions):
        return f"{preempted} requests were preempted: the KV cache is too small for the shape"
    if result["prefill"]["cached_tokens"]:
        return f"the prompts were not new: {result['prefill']['cached_tokens']} of their tokens came from the cache"
    # Every full page of a prompt is taken from the cache but its last, which vLLM computes again.
    reused = batch * ((shape["context_tokens"] - 1) // 64) * 64 if spec["reuse_prefill"] else 0
    for r in repetitions:
        if r["tokens_out"] != batch * tokens:
            return f"{r['tokens_out']} tokens came out, expected {batch} x {tokens}"
        if r["cached_tokens"] != reused:
            return f"{r['cached_tokens']} prompt tokens came from the prefix cache, expected {reused}"
        # The first token comes from the prompt; looking ahead, the engine may split the last step.
        if r["steps"] < tokens - 2:
            return f"all {batch} requests decoded together in only {r['steps']} steps, expected {tokens - 1}"
        if not spec["eager"] and (r["full_graph_steps"] != r["steps"] or r["padded_steps"]):
            return (
                f"of {r['steps']} decode steps {r['full_graph_steps']} replayed a full CUDA graph and "
                f"{r['padded_steps']} were padded (modes: {', '.join(r['modes'])})"
            )
    pages = result["pages"]
    if spec["settings"] is not None:
        least = len(repetitions) * batch * (tokens - 2)
        if pages["dense_rows"] or pages["sparse_rows"] < least:
            return (
                f"decode rows of the layers that should be sparse: {pages['dense_rows']} dense, {pages['sparse_rows']} "
                f"sparse in each; expected none dense and at least {least} sparse"
            )
    return None


def figures(result: dict[str, Any], spec: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The measured part of a cell from a shape's raw measurements."""
    repetitions, pages, health = result["repetitions"], result["pages"], result["health"]
    reuse = spec["reuse_prefill"]
    samples = [statistics.median(r["request_tpot_ms"]) if reuse else r["step_ms"] for r in repetitions]
    samples = [sample for sample in samples if sample is not None]  # no step of all requests: judged below
    ttft = result["prefill"]["ttft_ms"]
    reason = judge(result, spec, shape)
    throttled = any(int(state.get("throttle_reasons") or 0) & THROTTLE_BITS for state in health.values())
    return {
        "status": "invalid" if reason else "ok",
        **({"reason": reason} if reason else {}),
        "tpot_method": "request_timestamps" if reuse else "engine_step",
        "tpot_ms": {"median": statistics.median(samples) if samples else None, "samples": samples},
        "step_ms": [r["step_ms"] for r in repetitions],
        "ttft_ms": {"median": statistics.median(ttft), "max": max(ttft), "n": len(ttft)},
        "out_tok_s": statistics.median(r["tokens_out"] / r["seconds"] for r in repetitions),
        "tokens_out": sum(r["tokens_out"] for r in repetitions),
        "page_read_fraction": pages["pages_read"] / pages["pages_total"] if pages else 1.0,
        "pages": pages,
        "prefix_hit_tokens": sum(r["cached_tokens"] for r in repetitions),
        "full_graph_steps": sum(r["full_graph_steps"] for r in repetitions),
        "decode_steps": sum(r["steps"] for r in repetitions),
        "kv_used_pct": 100 * max(r["kv_used"] for r in repetitions),
        "prefill_s": result["prefill"]["seconds"],
        "health": health,
        "flags": ["T"] * throttled + ["E"] * spec["eager"],
    }


def merge_launches(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One cell per arm and shape: the first, with the time over its launches in ``timing``, as in `bench kernel`.

    A launch that failed makes the whole fail. ``launch_tpot_ms`` holds each launch's median by number.
    """
    import numpy as np

    from moira_cli.compare import bootstrap_medians

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["shape"]["alias"], cell["arm"]), []).append(cell)
    merged = []
    for group in groups.values():
        failed = next((cell for cell in group if cell["status"] != "ok"), None)
        if failed is not None:
            merged.append(failed)
            continue
        launches = [[1e3 * ms for ms in cell["tpot_ms"]["samples"]] for cell in group]
        median = statistics.median(statistics.median(launch) for launch in launches)
        low, high = (float(x) for x in np.percentile(bootstrap_medians(launches, seed=0), (2.5, 97.5)))
        time = {"median": median, "ci95": [low, high], "launches": launches}
        mean = {name: statistics.fmean(cell[name] for cell in group) for name in ("out_tok_s", "page_read_fraction")}
        merged.append(
            {
                **group[0],
                **mean,
                "ttft_ms": {**group[0]["ttft_ms"], "median": statistics.median(c["ttft_ms"]["median"] for c in group)},
                "launch_tpot_ms": {cell["launch"]: cell["tpot_ms"]["median"] for cell in group},
                "flags": sorted({flag for cell in group for flag in cell["flags"]}),
                "timing": {"step_us": time, "plan": {}, "total_us": median},
            }
        )
    return merged


def speedups(cell: dict[str, Any], base: dict[str, Any]) -> list[float]:
    """TPOT of ``base`` over that of ``cell``, launch by launch; both merged and ok."""
    ours, theirs = cell["launch_tpot_ms"], base["launch_tpot_ms"]
    return [theirs[launch] / ours[launch] for launch in ours if launch in theirs]
