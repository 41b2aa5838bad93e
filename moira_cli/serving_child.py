"""One vLLM engine, measured: the process that `moira bench e2e` starts for an arm. It can be run by hand.

    python -m moira_cli.serving_child SPEC.json

reads a specification (``moira_cli.serving.Spec``) and prints one JSON object a line on stdout; what vLLM prints goes to
stderr.

    {"event": "log", "message"}                 a line of the engine's log
    {"event": "engine", ...}                    once, when the engine is up: what it is
    {"event": "progress", "shape", "message"}
    {"event": "result", "shape", ...}           once per shape, raw measurements
    {"event": "unfit", "shape", "reason"}       or: the shape does not fit in the KV cache
    {"event": "failed", "reason", "oom"}        the engine failed; nothing follows
    {"event": "done"}

Prompts of a shape are prefilled once; then each repetition takes all but their last page from the prefix cache, so that
all requests decode together from the first token on. Without that (``reuse_prefill`` false) every repetition prefills,
and the time of a step is taken where all requests decode.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moira_kernels.vllm_plugin import WorkerExtension, register

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

PAGE_SIZE = 64
WARM_UP_TOKENS = 16
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # One process: the plugin is registered by hand, and engine steps are seen where they are scheduled.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Libraries that would only compile at the start what greedy decoding of a bf16 model does not use.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}
"""Set in the child unless set already; the same for every arm."""

Emit = Callable[..., None]


@dataclass(frozen=True)
class Step:
    """One step of the engine."""

    at: float
    tokens: int
    padded_tokens: int
    mode: str
    kv_used: float
    preempted: int


class StepLog:
    """Notes every step of the engine, as one of vLLM's statistics loggers."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Called by vLLM after each step; steps that ran nothing are left out."""
        graph = scheduler_stats and scheduler_stats.cudagraph_stats
        if graph:
            preempted = iteration_stats.num_preempted_reqs if iteration_stats else 0
            usage = scheduler_stats.kv_cache_usage
            padded = graph.num_padded_tokens
            self.steps.append(
                Step(time.perf_counter(), graph.num_unpadded_tokens, padded, graph.runtime_mode, usage, preempted)
            )

    def log(self, *_: Any) -> None:
        """Nothing to print."""

    log_engine_initialized = record_sleep_state = log


class BenchExtension(WorkerExtension):
    """What the bench asks of a worker, besides the plugin's counters."""

    def moira_set_counts(self, counts: list[list[int]]) -> None:
        """Page counts [layers][H_kv] from the next step on, captured graphs included."""
        import torch

        from moira_kernels.vllm_plugin.backend import MoiraMetadataBuilder, layer_index

        builders = [b for groups in self.model_runner.attn_groups for group in groups for b in group.metadata_builders]
        for builder in builders:
            if isinstance(builder, MoiraMetadataBuilder):
                for name in builder.group.layers:
                    with torch.inference_mode():
                        builder.group.set_counts(name, counts[layer_index(name)])

    def moira_attention(self) -> dict[str, Any]:
        """Backend, FlashAttention version and KV cache strides of the first layer, as the engine resolved them."""
        context = self.model_runner.vllm_config.compilation_config.static_forward_context
        layer = next(layer for layer in context.values() if hasattr(layer, "impl"))
        return {
            "backends": sorted(
                {group.backend.get_name() for groups in self.model_runner.attn_groups for group in groups}
            ),
            "fa_version": getattr(layer.impl, "vllm_flash_attn_version", None),
            "kv_shape": list(layer.kv_cache.shape),
            "kv_strides": list(layer.kv_cache.stride()),
            "scale_times_sqrt_d": layer.impl.scale * layer.impl.head_size**0.5,
            "runner": type(self.model_runner).__module__,
        }


def start_engine(spec: dict[str, Any]) -> LLM:
    """An engine as the specification says."""
    import vllm

    options: dict[str, Any] = {}
    if spec["dummy_weights"]:
        options["load_format"] = "dummy"
    if spec["prompts"] is None:
        options["skip_tokenizer_init"] = True
    if spec["backend"]:
        options["attention_config"] = {"backend": spec["backend"]}
    if spec["settings"] is not None:
        register()
        options["additional_config"] = {"moira": spec["settings"]}
    if spec["layer"]:
        from baselines.engine_layers import LAYERS
        from moira_kernels.vllm_plugin.backend import MoiraMetadataBuilder

        MoiraMetadataBuilder.layer_class = LAYERS[spec["layer"]]
    if not spec["eager"]:
        options["compilation_config"] = {"cudagraph_capture_sizes": spec["capture_sizes"]}
    return vllm.LLM(
        model=spec["model"],
        dtype="bfloat16",
        seed=spec["seed"],
        block_size=PAGE_SIZE,
        max_model_len=spec["max_model_len"],
        max_num_seqs=spec["max_num_seqs"],
        gpu_memory_utilization=spec["gpu_memory_utilization"],
        enable_prefix_caching=spec["reuse_prefill"],
        enforce_eager=spec["eager"],
        disable_log_stats=False,
        cudagraph_metrics=True,
        worker_extension_cls=f"moira_cli.serving_child.{BenchExtension.__name__}",
        **options,
    )


def describe_engine(llm: LLM, start_s: float) -> dict[str, Any]:
    """What the engine is, asked of the engine."""
    import vllm

    config = llm.llm_engine.vllm_config
    return {
        "vllm": vllm.__version__,
        "start_s": start_s,
        "kv_capacity_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "capture_sizes": config.compilation_config.cudagraph_capture_sizes,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async_scheduling": config.scheduler_config.async_scheduling,
        **llm.collective_rpc("moira_attention")[0],
    }


def make_prompts(llm: LLM, spec: dict[str, Any], shape: dict[str, Any]) -> list[list[int]]:
    """Token ids [batch][context], no two alike and the same for every arm: random, or stretches of a text file."""
    context, batch = shape["context_tokens"], shape["batch"]
    if spec["prompts"] is None:
        import numpy as np

        rng = np.random.default_rng([spec["seed"], context, batch])
        return rng.integers(spec["vocab_size"], size=(batch, context)).tolist()
    tokens = llm.get_tokenizer().encode(Path(spec["prompts"]).read_text(encoding="utf-8"))
    if len(tokens) < context * batch:
        raise ValueError(f"{spec['prompts']} has {len(tokens):,} tokens; {batch} x {context} need {batch * context:,}")
    return [tokens[i * context : (i + 1) * context] for i in range(batch)]


class Bench:
    """Measures the shapes of a specification on one engine."""

    def __init__(self, llm: LLM, spec: dict[str, Any], emit: Emit):
        self.llm, self.spec, self.emit = llm, spec, emit
        self.log = StepLog()
        llm.llm_engine.logger_manager.stat_loggers.append(self.log)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[RequestOutput]:
        """``tokens`` tokens for every prompt, all submitted at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.log.steps.clear()
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    def pages(self) -> dict[str, int] | None:
        """Decode rows and pages since the start, counted on the device; None for a dense arm.

        Of the layers that should be sparse: ``sparse_rows`` is the least that a layer decoded, ``dense_rows`` the sum.
        """
        if self.spec["settings"] is None:
            return None
        layers = list(self.llm.collective_rpc("moira_counters")[0].values())
        meant = [layer for layer in layers if layer["dense_because"] is None]
        return {
            "sparse_rows": min((layer["sparse_rows"] for layer in meant), default=0),
            "dense_rows": sum(layer["dense_rows"] for layer in meant),
            "pages_read": sum(layer["pages_read"] for layer in layers),
            "pages_total": sum(layer["pages_total"] for layer in layers),
        }

    def measure(self, shape: dict[str, Any]) -> dict[str, Any]:
        """Raw measurements of one shape."""
        label = shape["label"]
        prompts = make_prompts(self.llm, self.spec, shape)
        self.llm.reset_prefix_cache()
        self.emit("progress", shape=label, message="prefill")
        before = gpu_state()
        start = time.perf_counter()
        outputs = self.generate(prompts, 1)
        prefill = {
            "seconds": time.perf_counter() - start,
            "ttft_ms": [1e3 * output.metrics.first_token_latency for output in outputs],
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        }
        if shape["counts"] is not None:
            self.llm.collective_rpc("moira_set_counts", args=(shape["counts"],))
        if self.spec["reuse_prefill"]:
            self.generate(prompts, WARM_UP_TOKENS)
        counted = self.pages()
        repetitions = []
        for number in range(1, self.spec["repetitions"] + 1):
            self.emit("progress", shape=label, message=f"repetition {number}/{self.spec['repetitions']}")
            repetitions.append(self.repetition(prompts))
        if counted is not None:
            counted = {name: value - counted[name] for name, value in self.pages().items()}
        return {
            "prefill": prefill,
            "repetitions": repetitions,
            "pages": counted,
            "health": {"before": before, "after": gpu_state()},
        }

    def repetition(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Decode once: times of the requests and what the engine's steps were."""
        tokens, batch = self.spec["tokens"], len(prompts)
        start = time.perf_counter()
        outputs = self.generate(prompts, tokens)
        seconds = time.perf_counter() - start
        metrics = [output.metrics for output in outputs]
        decode = decode_steps(self.log.steps, batch)
        gaps = [1e3 * (b.at - a.at) for a, b in pairwise(decode)]
        return {
            "seconds": seconds,
            "request_tpot_ms": [1e3 * (m.last_token_ts - m.first_token_ts) / (tokens - 1) for m in metrics],
            "step_ms": statistics.fmean(gaps) if gaps else None,
            "steps": len(decode),
            "full_graph_steps": sum(step.mode == "FULL" for step in decode),
            "padded_steps": sum(step.padded_tokens != batch for step in decode),
            "modes": sorted({step.mode for step in decode}),
            "tokens_out": sum(len(output.outputs[0].token_ids) for output in outputs),
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
            "preemptions": sum(step.preempted for step in self.log.steps),
            "kv_used": max((step.kv_used for step in self.log.steps), default=0.0),
        }


def decode_steps(steps: list[Step], batch: int) -> list[Step]:
    """The steps in which all ``batch`` requests decode: those of ``batch`` tokens after the last larger one."""
    last = max((i for i, step in enumerate(steps) if step.tokens > batch), default=-1)
    return [step for step in steps[last + 1 :] if step.tokens == batch]


def gpu_state() -> dict[str, Any]:
    """Clocks, power and throttling; empty without a GPU."""
    import torch

    from moira_cli import environment

    return environment.gpu_state(torch.cuda.current_device()) if torch.cuda.is_available() else {}


def unfit(shape: dict[str, Any], spec: dict[str, Any], capacity_tokens: int) -> str | None:
    """Why a shape does not fit in the KV cache, or None."""
    need = shape["batch"] * (-(-(shape["context_tokens"] + spec["tokens"]) // PAGE_SIZE) + 1) * PAGE_SIZE
    if need <= capacity_tokens:
        return None
    return f"{shape['label']} needs {need:,} tokens of KV cache, the engine has {capacity_tokens:,}"


def run(spec: dict[str, Any], emit: Emit) -> None:
    """Start the engine and measure every shape."""
    start = time.perf_counter()
    llm = start_engine(spec)
    engine = describe_engine(llm, time.perf_counter() - start)
    if spec["layer"] and abs(engine["scale_times_sqrt_d"] - 1) > 1e-6:
        raise ValueError(
            f"{spec['arm']}: expected a softmax scale of 1 / sqrt(D), got {engine['scale_times_sqrt_d']} of it"
        )
    emit("engine", **engine)
    bench = Bench(llm, spec, emit)
    for shape in spec["shapes"]:
        if reason := unfit(shape, spec, engine["kv_capacity_tokens"]):
            emit("unfit", shape=shape["label"], reason=reason)
        else:
            emit("result", shape=shape["label"], **bench.measure(shape))
    llm.llm_engine.engine_core.shutdown()
    emit("done")


class _Forward(logging.Handler):
    """Sends vLLM's log lines as events."""

    def __init__(self, emit: Emit):
        super().__init__(logging.INFO)
        self.to = emit

    def emit(self, record: logging.LogRecord) -> None:
        self.to("log", message=record.getMessage().splitlines()[0][:200] if record.getMessage() else "")


def set_environment(spec: dict[str, Any]) -> None:
    """The variables of an engine; before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(spec["environment"])


def main() -> None:
    """Run the specification named on the command line."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Lines of the protocol go to what stdout is now; whatever else is printed, by libraries too, goes to stderr.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=channel, flush=True)

    set_environment(spec)
    try:
        import vllm  # noqa: F401  (sets up the logger)

        logging.getLogger("vllm").addHandler(_Forward(emit))
        run(spec, emit)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        oom = type(error).__name__ == "OutOfMemoryError"
        emit("failed", reason=f"{type(error).__name__}: {lines[0]}", oom=oom)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
