"""Real vLLM engines for tests: in this process, on a GPU with the plugin as it is, or with vLLM's CPU build.

vLLM's CPU platform takes its own backend whatever is chosen, so there the choice CUSTOM is patched in, with the
validation that the CUDA platform does.
"""

import gc
import json
import os

import pytest
import torch

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
vllm = pytest.importorskip("vllm", reason="runs in a virtual environment with vLLM: see .ci/run")
if not torch.cuda.is_available():
    # Many small operations: threads that wait for each other make them ten times slower on a busy machine.
    torch.set_num_threads(1)

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write_config(folder, **changes):
    """A model directory that holds only a configuration, for ``load_format="dummy"``."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | changes))
    return str(folder)


def write_model(folder, **changes):
    """A model directory with random weights whose attention is selective: queries and keys of standard deviation 2."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(write_config(folder, **changes)))
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.normal_(std=2 / weight.shape[1] ** 0.5)
    network.bfloat16().save_pretrained(folder)
    return str(folder)


def smollm2_folder():
    """SmolLM2-135M in bf16 as a model directory; dequantised once from the weights of `moira record`."""
    from moira_cli import models

    folder = models.cache_folder() / f"{models.DEFAULT_MODEL}-bf16"
    if not (folder / "done").exists():
        network, tokenizer, _ = models.load(models.DEFAULT_MODEL, "cpu")
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "done").touch()
    return str(folder)


def choose_on_cpu():
    """Let CUSTOM stand for the plugin's CPU classes, refused like on a CUDA platform of capability 9.0."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from moira_kernels.vllm_plugin.cpu import CpuBackend

    original = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return original(cls, selected_backend, attn_selector_config, num_heads)
        assert AttentionBackendEnum.CUSTOM.get_path() == "moira_kernels.vllm_plugin.backend.MoiraBackend"
        reasons = CpuBackend.validate_configuration(
            device_capability=DeviceCapability(9, 0), **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"Selected backend CUSTOM is not valid for this configuration. Reason: {reasons}")
        return f"{CpuBackend.__module__}.{CpuBackend.__qualname__}"

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def start(model, moira=None, **options):
    """An engine in this process; ``moira`` is the plugin's settings, None for vLLM as it is."""
    from moira_kernels.vllm_plugin import register

    register()  # as the entry point does where the project is installed
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        choose_on_cpu()
    defaults = {
        "dtype": "bfloat16",
        "block_size": 64,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    if on_cpu:
        defaults["enforce_eager"] = True
    if moira is not None:
        defaults |= {
            "attention_config": {"backend": "CUSTOM"},
            "additional_config": {"moira": moira},
            "worker_extension_cls": "moira_kernels.vllm_plugin.WorkerExtension",
        }
    return vllm.LLM(model, **(defaults | options))


def stop(llm):
    """End the engine and give its memory back."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    vllm.envs.disable_envs_cache()  # the next engine may have other variables
    gc.collect()


def runner(llm):
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def builders(llm):
    """Metadata builders of an engine in this process, by attention group."""
    return [group.metadata_builders[0] for groups in runner(llm).attn_groups for group in groups]


def layers(llm):
    """Attention layers by name."""
    context = runner(llm).vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "impl")}


def greedy(llm, prompts, tokens):
    """Greedy continuations of token-id prompts, in order: (token ids, gap of the two largest log-probabilities).

    ``tokens`` is how many, for all or for each.
    """
    prompts = list(prompts)
    sampling = [
        vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=2)
        for n in ([tokens] * len(prompts) if isinstance(tokens, int) else tokens)
    ]
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = [request.outputs[0] for request in llm.generate(inputs, sampling, use_tqdm=False)]
    gaps = []
    for output in outputs:
        best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in output.logprobs]
        gaps.append([first - second for first, second, *_ in best])
    return [(list(output.token_ids), gap) for output, gap in zip(outputs, gaps, strict=True)]


def first_divergence(a, b):
    """First position where two token lists differ, None if nowhere."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
