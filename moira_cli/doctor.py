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
            name: arm.missing("cuda" if visible else "cpu") or "available" for name, arm in baselines.describe().items()
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
        advice.append("Nsight Systems (nsys) is not on the PATH.")
    if free < 1e9:
        advice.append(f"Only {free / 1e9:.1f} GB of disk is free for results.")
    return advice


def doctor(json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Show the GPU, driver, libraries, profilers and arms of this machine, and what is missing."""
    from moira_cli.records import dumps
    from moira_cli.render import new_console, new_table

    report = diagnose()
    if json_output:
        print(dumps(report, indent=1))
        return
    console = new_console()
    env, tool = report["env"], report["tool"]
    table = new_table("", "", left=2)
    commit = f", commit {tool['commit']}{' + changes' if tool['dirty'] else ''}" if tool["commit"] else ""
    table.add_row("moira", tool["version"] + commit)
    table.add_row("python", f"{env['python']} on {env['os']}")
    table.add_row("cpu", f"{env['cpu']}, {env['cpu_threads']} threads")
    for index, gpu in enumerate(report["gpus"]):
        table.add_row(
            f"gpu {index}",
            f"{gpu['name']}, driver {gpu['driver']}, {gpu['memory_used_mib']:,} of {gpu['memory_total_mib']:,} MiB used, "
            f"{gpu['busy_pct']}% busy, {gpu['sm_mhz']} of {gpu['sm_max_mhz']} MHz, {gpu['power_w']} of {gpu['power_limit_w']} W",
        )
    if env["gpu"]:
        gpu = env["gpu"]
        table.add_row(
            "cuda", f"{env['cuda']}, {gpu['sm']}, {gpu['multiprocessors']} SMs, {gpu['l2_bytes'] / 1e6:.0f} MB L2"
        )
    elif not report["gpus"]:
        table.add_row("gpu", "none")
    for name, version in env["libraries"].items():
        table.add_row(name, version or "not installed")
    for name, path in report["profilers"].items():
        table.add_row(name, path or "not found")
    table.add_row("disk", f"{report['disk_free_bytes'] / 1e9:.0f} GB free")
    for name, state in report["arms"].items():
        table.add_row(f"arm {name}", state)
    console.print(table)
    for line in report["advice"]:
        console.print(f"! {line}")
