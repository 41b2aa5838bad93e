"""vLLM engines as child processes: what an arm is, its specification, and the protocol with ``serving_child``."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moira_cli.records import write_atomically

CHILD = (sys.executable, "-m", "moira_cli.serving_child")
SHUTDOWN_S = 20


@dataclass(frozen=True)
class EngineArm:
    """One way to decode in vLLM.

    Attributes:
        backend: vLLM's attention backend.
        sparse: whether decode rows read only the pages that Moira's Estimate and Select keep.
        needs: (module, how to get it) of what must be there besides vLLM.
        summary: one line.
        layer: in ``baselines.engine_layers``, whose attention takes the place of Attend.
    """

    backend: str
    sparse: bool
    needs: tuple[tuple[str, str], ...]
    summary: str
    layer: str | None = None

    def missing(self) -> str | None:
        """What to install before this arm can run, or None."""
        absent = [f"{name} ({how})" for name, how in self.needs if importlib.util.find_spec(name) is None]
        return f"needs {' and '.join(absent)}" if absent else None


_FLASHINFER = ("flashinfer", "pip install 'moira-attention[flashinfer]'")

ARMS = {
    "dense-fa3": EngineArm("FLASH_ATTN", False, (), "vLLM's FlashAttention 3 over every page"),
    "dense-flashinfer": EngineArm("FLASHINFER", False, (_FLASHINFER,), "vLLM's FlashInfer backend over every page"),
    "moira": EngineArm("CUSTOM", True, (), "Estimate, Select, Attend and Merge in vLLM's CUDA graphs"),
    "fa3-coverage": EngineArm(
        "CUSTOM", True, (), "Moira's lists attended by FlashAttention 3, metadata made in every layer", "fa3"
    ),
    "flashinfer-coverage": EngineArm(
        "CUSTOM",
        True,
        (_FLASHINFER,),
        "Moira's lists attended by FlashInfer under one plan for rows of full width",
        "flashinfer",
    ),
}
"""Arms of `bench e2e` by name; the last two are the paper's FA3^c and FlashInfer^c."""


@dataclass(frozen=True)
class Spec:
    """What a child needs to know; written as JSON, so that the child can be run again by hand.

    Attributes:
        arm: its name, for people.
        backend: vLLM's attention backend; None for vLLM's own choice.
        settings: the plugin's (``MoiraConfig``); None for a dense arm.
        layer: of ``EngineArm``.
        model: directory with config.json.
        dummy_weights: whether the weights are made up.
        prompts: a text file, or None for random token ids below ``vocab_size``.
        max_model_len: most tokens of a request.
        max_num_seqs: most requests of a step.
        capture_sizes: batches for which vLLM captures a CUDA graph.
        gpu_memory_utilization: vLLM's.
        eager: no graphs and no compilation.
        reuse_prefill: repetitions take their prompts from the prefix cache.
        tokens: output tokens per request and repetition.
        repetitions: how often each shape is decoded.
        seed: of prompts and dummy weights.
        environment: further variables, e.g. VLLM_KV_CACHE_LAYOUT.
        shapes: dicts of label, context_tokens, batch and counts ([layers][H_kv] pages, or None for the coverage rule).
    """

    arm: str
    backend: str | None
    settings: dict[str, Any] | None
    layer: str | None
    model: str
    dummy_weights: bool
    prompts: str | None
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    capture_sizes: list[int]
    gpu_memory_utilization: float
    eager: bool
    reuse_prefill: bool
    tokens: int
    repetitions: int
    seed: int
    environment: dict[str, str]
    shapes: list[dict[str, Any]]


class Child:
    """A running engine process. ``messages`` yields its events; ``stop`` ends it whatever it is doing.

    Args:
        spec: written to ``folder``/NAME.json; the engine's own output goes to ``folder``/NAME.log.
        folder: made if missing.
        name: of this launch.
    """

    def __init__(self, spec: Spec, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.spec_path, self.log_path = folder / f"{name}.json", folder / f"{name}.log"
        write_atomically(self.spec_path, json.dumps(asdict(spec)) + "\n")
        with self.log_path.open("ab") as log:
            # A session of its own, so that stop() reaches the processes that the engine starts for compiling.
            self.process = subprocess.Popen(
                [*CHILD, str(self.spec_path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    @property
    def repeat_command(self) -> str:
        """The command that runs this child again by hand."""
        return shlex.join(["python", "-m", "moira_cli.serving_child", str(self.spec_path)])

    def messages(self, timeout_s: float, tick_s: float = 1.0) -> Iterator[dict[str, Any]]:
        """Events until the child ends; a last event "end" says how: its ``reason`` is None after "done".

        Between events a "tick" comes every ``tick_s``, for progress. ``timeout_s`` without an event stops the child.
        """
        last, done = time.monotonic(), False
        while True:
            try:
                line = self._lines.get(timeout=tick_s)
            except queue.Empty:
                if time.monotonic() - last > timeout_s:
                    self.stop()
                    yield {"event": "end", "status": "timeout", "reason": f"no sign of life for {timeout_s:g} s"}
                    return
                yield {"event": "tick"}
                continue
            last = time.monotonic()
            if line is None:
                break
            try:
                message = json.loads(line)
                event = message["event"]
            except (ValueError, TypeError, KeyError):
                self.stop()
                reason = f"not a line of the protocol: {line[:80].decode(errors='replace').strip()!r}"
                yield {"event": "end", "status": "error", "reason": reason}
                return
            done = event == "done"
            if event == "failed":
                self.stop()
                yield {"event": "end", "status": "oom" if message["oom"] else "error", "reason": message["reason"]}
                return
            yield message
        code = self._wait()
        reason = None if done and code == 0 else f"the engine process ended {_ending(code)}{self._last_words()}"
        yield {"event": "end", "status": "error", "reason": reason}

    def _last_words(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1][:160]}" if lines else ""

    def _wait(self) -> int:
        try:
            return self.process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self.stop()
            return self.process.returncode

    def stop(self) -> None:
        """End the process and all it started: asked first, killed after SHUTDOWN_S."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(SHUTDOWN_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()


def _ending(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
