"""Recording page lists with a real decoder: a tiny random Llama, and the real model that a registry package carries."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moira_cli import lists, models
from moira_cli.errors import CliError
from moira_cli.lists import SHIPPED, load_recorded
from moira_cli.main import app
from moira_cli.record import read_text
from tests.test_cli import ENVIRONMENT, one_line, restore_interrupts

transformers = pytest.importorskip("transformers")

OPTIONS = ["--context", "300", "--documents", "2", "--steps", "6", "--gamma", "0.9", "--page-size", "16"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random two-layer Llama with a byte-level tokenizer, saved as a model directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny-llama")
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(config)
    for parameter in network.parameters():  # sharper attention than a fresh model's
        parameter.data.mul_(3)
    network.save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(read_text("python-topics")[0][:900])
    return path


def record(*arguments):
    return CliRunner().invoke(app, ["record", *map(str, arguments)])


def test_recording_of_a_model_directory(model_folder, text_file, tmp_path):
    path = tmp_path / "lists.npz"
    result = record(path, "--model", model_folder, "--text", text_file, *OPTIONS)
    assert result.exit_code == 0, result.output
    assert "CV across layers" in result.stdout
    recorded = load_recorded(path)
    assert recorded.meta["complete"]
    assert recorded.meta["geometry"] == [4, 2, 16]
    assert recorded.counts.shape == (12, 2, 2)
    assert recorded.document.tolist() == [0] * 6 + [1] * 6
    assert recorded.num_pages.tolist() == [19] * 12
    assert (recorded.counts < 19).any()
    for step in range(12):
        keep = recorded.keep(step)
        assert keep[..., [0, 18]].all()
        assert (keep.sum(-1) == recorded.counts[step]).all()
    assert ((recorded.covered > 0) & (recorded.covered <= 1.001)).all()
    assert record(path, "--describe").exit_code == 0
    batch = lists.from_recorded(recorded, 4, 8, 64, seed=0)
    assert batch.keep().shape == (4, 8, 64)


def test_stopped_by_ctrl_c_and_resumed(model_folder, text_file, tmp_path):
    options = ["--model", model_folder, "--text", text_file, *OPTIONS]
    assert record(tmp_path / "whole.npz", *options).exit_code == 0
    code = (
        "import os, signal, moira_cli.record as r\n"
        "add = r.Recording.add\n"
        "def stop(self, document, step):\n"
        "    add(self, document, step)\n"
        "    if len(self) == 8: os.kill(os.getpid(), signal.SIGINT)\n"
        "r.Recording.add = stop\n"
        f"from moira_cli.main import app; app({['record', 'part.npz', *map(str, options)]!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        preexec_fn=restore_interrupts,
    )
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "8 of 12 steps are in part.npz" in done.stderr.splitlines()[-1]
    part = load_recorded(tmp_path / "part.npz")
    assert not part.meta["complete"]
    assert len(part.document) == 8
    other = record(tmp_path / "part.npz", *options, "--gamma", "0.8", "--resume")
    one_line(other, 2, "was recorded with gamma = 0.9, now 0.8")
    assert record(tmp_path / "part.npz", *options, "--resume").exit_code == 0
    whole, resumed = load_recorded(tmp_path / "whole.npz"), load_recorded(tmp_path / "part.npz")
    assert resumed.meta["complete"]
    for name in lists.ARRAYS:
        if name != "meta":
            assert np.array_equal(getattr(whole, name), getattr(resumed, name)), name


def test_gamma_one_decodes_like_the_dense_model(model_folder):
    """Every page kept: the logits of each decode step are those of the model's own attention."""
    from moira_cli.recorder import Recorder

    tokens = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(1))
    load = transformers.LlamaForCausalLM.from_pretrained
    with torch.inference_mode():
        dense = load(model_folder, dtype=torch.float32)(tokens[None]).logits[0]
    for gamma, close in ((1.0, True), (0.5, False)):
        network = load(model_folder, dtype=torch.float32)
        logits = []
        network.lm_head.register_forward_hook(
            lambda module, inputs, output, logits=logits: logits.append(output[0, -1])
        )
        steps = list(Recorder(network, gamma, 16).decode(tokens, 10))
        assert len(steps) == 10
        difference = (torch.stack(logits[1:]) - dense[-10:]).abs().max().item()
        assert (difference < 1e-3) == close, difference


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--gamma", "0"], ["--gamma: expected a number"]),
        (["--steps", "300"], ["fewer steps than context"]),
        (["--context", "1000"], ["more than the 512 positions"]),
        (["--documents", "50"], ["tokens; 50 x 300 need 15,000"]),
        (["--text", "missing.txt"], ["missing.txt", "No such file"]),
        (["--model", "nowhere"], ["directory with config.json"]),
        (["--device", "tpu"], ["--device: expected auto"]),
    ],
)
def test_wrong_settings_write_nothing(model_folder, text_file, tmp_path, arguments, parts):
    path = tmp_path / "lists.npz"
    result = record(path, "--model", model_folder, "--text", text_file, *OPTIONS, *arguments)
    one_line(result, 2, *parts)
    assert not path.exists()


def test_layers_that_the_rule_does_not_cover_are_refused():
    from moira_cli.recorder import CoverageAttention
    from moira_kernels import UnsupportedError

    module = type("Layer", (), {"layer_idx": 4})()
    x = torch.zeros(1, 2, 1, 16)
    with pytest.raises(UnsupportedError, match="layer 4: sliding_window attention is not covered"):
        CoverageAttention(0.98, 64)(module, x, x, x, None, sliding_window=512)


def test_the_shipped_recording_is_what_its_command_records():
    """The first steps again, from the same weights and text; other processors may round a page in or out."""
    from moira_cli.recorder import Recorder

    recorded = load_recorded(SHIPPED)
    meta = recorded.meta
    text, origin = read_text("python-topics")
    if origin != meta["text"]:
        pytest.skip(f"the recording's text is {meta['text']}, this is {origin}")
    try:
        network, tokenizer, source = models.load(models.DEFAULT_MODEL, "cpu")
    except CliError as error:
        pytest.skip(str(error))
    assert source["sha256"] == meta["weights_sha256"]
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: meta["context_tokens"]])
    steps = Recorder(network, meta["gamma"], meta["page_size"]).decode(tokens, meta["steps"])
    for index in range(2):
        keep, shipped = np.stack(next(steps).keep), recorded.keep(index)
        assert (keep == shipped).mean() > 0.99
    assert json.dumps(meta)
