"""What the numbers were measured on: GPU, driver, libraries, code version, and whether the GPU is idle and healthy."""

from __future__ import annotations

import csv
import importlib.metadata
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moira_cli import __version__
from moira_cli.errors import CliError, ExitCode

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "triton", "numpy", "vllm", "tokenspeed-fa3", "flashinfer-python", "transformers", "gguf", "nvtx")
GPU_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "memory_total_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "busy_pct": "utilization.gpu",
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "throttle_reasons": "clocks_event_reasons.active",
    "mig": "mig.mode.current",
    "ecc": "ecc.mode.current",
}
# Bits of clocks_event_reasons that mean slower than asked for: software power cap, hardware slowdown,
# software thermal, hardware thermal, hardware power brake. Idle and application clocks are not among them.
THROTTLE_BITS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def run_text(*command: str) -> str | None:
    """Standard output of a command, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def library_versions() -> dict[str, str | None]:
    """Installed versions by distribution name; None if absent. Imports nothing."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@cache
def code_version() -> dict[str, Any]:
    """Version of this tool and, in a git checkout, its commit and whether the tree has changes."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return {"name": "moira", "version": __version__, "commit": None, "dirty": None}
    commit = run_text("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    status = run_text("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    dirty = bool(status) if commit and status is not None else None
    return {"name": "moira", "version": __version__, "commit": commit or None, "dirty": dirty}


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _number(text: str) -> Any:
    text = text.strip()
    if text.startswith("0x"):
        return int(text, 16)
    try:
        value = float(text)
    except ValueError:
        return None if text.startswith("[") or text == "N/A" else text
    return int(value) if value.is_integer() else value


def resolve_device(text: str) -> torch.device:
    """'auto' is the first GPU, or the CPU where there is none."""
    import torch

    if text == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise CliError(f"--device: expected auto, cpu, cuda or cuda:N, got '{text}'.")
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise CliError(
            f"No CUDA GPU {index} is visible ({torch.cuda.device_count()} found). Without a GPU this command runs "
            "on the CPU: leave --device out, or see 'moira doctor'.",
            ExitCode.ENVIRONMENT,
        )
    return torch.device("cuda", index)


def query_gpus() -> list[dict[str, Any]]:
    """One dict of ``GPU_FIELDS`` per GPU from nvidia-smi; empty where there is none."""
    query = ",".join(GPU_FIELDS.values())
    text = run_text("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    if not text:
        return []
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(GPU_FIELDS, map(_number, row), strict=True)) for row in rows]


def gpu_state(index: int) -> dict[str, Any]:
    """Clocks, power, temperature, throttling and load of one visible GPU right now; empty if not readable."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return next((gpu for gpu in query_gpus() if gpu["uuid"] == uuid), {})


def describe(device: str) -> dict[str, Any]:
    """Everything that has to agree for two results to be comparable. ``device`` is 'cpu' or 'cuda:N'."""
    import torch

    env: dict[str, Any] = {
        "device": device.split(":")[0],
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "libraries": library_versions(),
        "cuda": torch.version.cuda,
        "gpu": None,
    }
    if env["device"] == "cuda":
        index = int(device.split(":")[1])
        properties = torch.cuda.get_device_properties(index)
        state = gpu_state(index)
        env["gpu"] = {
            "index": index,
            "name": properties.name,
            "uuid": str(properties.uuid),
            "sm": f"sm_{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "driver": state.get("driver"),
            "mig": state.get("mig"),
            "ecc": state.get("ecc"),
            "power_limit_w": state.get("power_limit_w"),
        }
    return env


def identity(env: dict[str, Any]) -> dict[str, Any]:
    """The part of ``describe`` that names the hardware and software, without what changes from minute to minute."""
    gpu = env["gpu"] or {}
    return {
        "device": gpu.get("name") or env["cpu"],
        "driver": gpu.get("driver"),
        "cpu_threads": env["cpu_threads"] if env["device"] == "cpu" else None,
        "torch": env["libraries"]["torch"],
        "triton": env["libraries"]["triton"],
    }


def profilers() -> dict[str, str | None]:
    """Paths of Nsight Systems and Nsight Compute; None where absent."""
    return {name: shutil.which(name) for name in ("nsys", "ncu")}
