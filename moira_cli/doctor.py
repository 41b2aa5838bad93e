"""`moira doctor`: what this machine can measure, and what is missing for the rest."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def diagnose() -> dict[str, Any]:
    """Everything `moira doctor` reports, as JSON values."""
    import shutil

    import torch

    import baselines
    from moira_cli import environment

    visible = torch.cuda.is_available()
    device = "cuda:0" if visible else "cpu"
    gpus = environment.query_gpus()
    free = shutil.disk_usage(".").free
    return {
        "tool": environment.code_version(),
        "env": environment.describe(device),
        "gpus": gpus,
        "cuda_available": visible,
        "profilers": environment.profilers(),
        "disk_free_bytes": free,
        "arms": {
            name: arm.missing("cuda" if visible else "cpu") or "available"
            for name, arm in baselines.describe(None).items()
        },
        "advice": _advice(visible, gpus, environment.profilers(), free),
    }


def _advice(visible: bool, gpus: list[dict[str, Any]], tools: dict[str, str | None], free: int) -> list[str]:
    import os

    from moira_cli.environment import THROTTLE_BITS

    advice = []
    if not visible:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "" if seen is None else f' (CUDA_VISIBLE_DEVICES="{seen}")'
        advice.append(
            f"No CUDA GPU is visible to PyTorch{where}: 'moira bench kernel' runs on the CPU and labels its times cpu."
        )
    for index, gpu in enumerate(gpus):
        if (gpu["busy_pct"] or 0) > 10 or (gpu["memory_used_mib"] or 0) > 2048:
            advice.append(
                f"GPU {index} is in use ({gpu['busy_pct']}% busy, {gpu['memory_used_mib']} MiB): times would be wrong."
            )
        if (gpu["throttle_reasons"] or 0) & THROTTLE_BITS:
            advice.append(f"GPU {index} is slowed down (clock event reasons {gpu['throttle_reasons']:#x}).")
        if gpu["mig"] == "Enabled":
            advice.append(f"GPU {index} is in MIG mode: bandwidth is that of the slice.")
    if visible and tools["nsys"] is None:
        advice.append("Nsight Systems (nsys) is not on the PATH: 'moira profile' uses torch.profiler.")
    if free < 1e9:
        advice.append(f"Only {free / 1e9:.1f} GB of disk is free for results.")
    return advice


def doctor(json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Show the GPU, driver, libraries, profilers and arms of this machine, and what is missing."""
    from moira_cli.records import dumps
    from moira_cli.render import columns

    report = diagnose()
    if json_output:
        print(dumps(report, indent=1))
        return
    env, tool = report["env"], report["tool"]
    rows: list[tuple[str, str]] = []
    commit = f", commit {tool['commit']}{' + changes' if tool['dirty'] else ''}" if tool["commit"] else ""
    rows.append(("moira", tool["version"] + commit))
    rows.append(("python", f"{env['python']} on {env['os']}"))
    rows.append(("cpu", f"{env['cpu']}, {env['cpu_threads']} threads"))
    for index, gpu in enumerate(report["gpus"]):
        rows.append(
            (
                f"gpu {index}",
                f"{gpu['name']}, driver {gpu['driver']}, {gpu['busy_pct']}% busy, "
                f"{gpu['memory_used_mib']:,} of {gpu['memory_total_mib']:,} MiB used, "
                f"{gpu['sm_mhz']} of {gpu['sm_max_mhz']} MHz, {gpu['power_w']} of {gpu['power_limit_w']} W",
            )
        )
    if env["gpu"]:
        gpu = env["gpu"]
        size = f"{gpu['multiprocessors']} SMs, {gpu['l2_bytes'] / 1e6:.0f} MB L2"
        rows.append(("cuda", f"{env['cuda']}, {gpu['sm']}, {size}"))
    elif not report["gpus"]:
        rows.append(("gpu", "none"))
    for name, version in env["libraries"].items():
        rows.append((name, version or "not installed"))
    for name, path in report["profilers"].items():
        rows.append((name, path or "not found"))
    rows.append(("disk", f"{report['disk_free_bytes'] / 1e9:.0f} GB free"))
    for name, state in report["arms"].items():
        rows.append((f"arm {name}", state))
    print("\n".join([*columns(rows), *(f"! {line}" for line in report["advice"])]))
