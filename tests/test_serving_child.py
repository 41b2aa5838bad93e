"""`moira bench e2e` with real vLLM engines: vLLM's CPU build, a tiny model with dummy weights, no graphs."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests import engines
from tests.test_cli import moira, read_run

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU"),
]

from moira_cli import bench_e2e, environment, lists, models, profilers, serving  # noqa: E402
from moira_cli.errors import ProfilerError  # noqa: E402

# The child, on a platform where the choice CUSTOM has to be patched in first; that prints, so stdout is kept apart.
CHILD = """
import os
stdout = os.dup(1)
os.dup2(2, 1)
from tests import engines
engines.choose_on_cpu()
os.dup2(stdout, 1)
from moira_cli.serving_child import main
main()
"""
CAPTURE = CHILD.replace("serving_child", "capture_engine")
TOKENS, REPETITIONS = 10, 2


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setattr(bench_e2e, "require_engine", lambda: (environment.describe("cpu"), {}))
    monkeypatch.setattr(serving, "CHILD", (sys.executable, "-c", CHILD))
    monkeypatch.setitem(models.PRESETS, "tiny", engines.TINY_LLAMA)

    def go(*arguments):
        numbers = ("--tokens", TOKENS, "--repetitions", REPETITIONS, "--launches", 1, "--run-dir", "r")
        # vLLM's CPU backend wants head-major caches.
        return moira("bench", "e2e", "--model", "tiny", "--eager", "--kv-layout", "hnd", *numbers, *arguments)

    return go


def test_dense_and_sparse_arms_on_the_same_prompts(run):
    result = run("--arms", "dense-fa3,moira", "--shape", "256x2,500x1", "--reads", "0.6")
    assert result.exit_code == 0, result.output
    cells = read_run(Path("r"))["cells"]
    assert [(cell["arm"], cell["shape"]["alias"]) for cell in cells] == [
        (arm, shape) for arm in ("dense-fa3", "moira") for shape in ("256x2", "500x1")
    ]
    for cell in cells:
        batch = cell["shape"]["batch"]
        assert cell["flags"] == ["E"]
        assert all(ms > 0 for ms in cell["tpot_ms"]["samples"])
        assert cell["decode_steps"] == REPETITIONS * (TOKENS - 1)
        assert cell["full_graph_steps"] == 0
        assert cell["tokens_out"] == REPETITIONS * TOKENS * batch
        cached = (cell["shape"]["context_tokens"] - 1) // 64 * 64
        assert cell["prefix_hit_tokens"] == REPETITIONS * batch * cached
        assert cell["engine_detail"]["backends"] == ["CUSTOM" if cell["arm"] == "moira" else "CPU_ATTN"]
    recorded = lists.load_recorded(lists.SHIPPED)
    for cell in cells[2:]:
        # Counted in the engine's steps: the profile's pages, in every decoding row of every layer.
        batch, context = cell["shape"]["batch"], cell["shape"]["context_tokens"]
        counts = lists.profiled_counts(recorded, 3, 2, -(-(context + TOKENS // 2) // 64), 0.6, 0)
        rows = REPETITIONS * (TOKENS - 1) * batch
        assert cell["pages"]["sparse_rows"] == rows
        assert cell["pages"]["dense_rows"] == 0
        assert cell["pages"]["pages_read"] == counts.sum() * rows
        steps = range(context + 1, context + TOKENS)
        assert cell["pages"]["pages_total"] == REPETITIONS * batch * 6 * sum(-(-length // 64) for length in steps)


def test_prefilling_each_time_uses_no_cache(run):
    result = run("--arms", "moira", "--shape", "256x2", "--reads", "0.6", "--no-reuse-prefill")
    assert result.exit_code == 0, result.output
    (cell,) = read_run(Path("r"))["cells"]
    assert (cell["tpot_method"], cell["prefix_hit_tokens"]) == ("engine_step", 0)
    assert cell["tpot_ms"]["samples"] == cell["step_ms"]


def test_a_graph_that_is_not_there_a_shape_that_does_not_fit_an_engine_that_refuses(run, monkeypatch):
    result = run("--arms", "moira", "--shape", "1kx2000,256x1", "--reads", "0.6", "--no-eager")
    assert result.exit_code == 5, result.output
    cells = read_run(Path("r"))["cells"]
    assert [cell["status"] for cell in cells] == ["oom", "invalid"]
    assert "1kx2000 needs 2,304,000 tokens of KV cache" in cells[0]["reason"]
    assert "0 replayed a full CUDA graph" in cells[1]["reason"]
    monkeypatch.setitem(models.PRESETS, "tiny", engines.TINY_LLAMA | {"num_attention_heads": 5})
    result = run("--arms", "moira", "--shape", "256x1", "--reads", "0.6", "--run-dir", "broken")
    assert result.exit_code == 5, result.output
    (cell,) = read_run(Path("broken"))["cells"]
    assert cell["status"] == "error"
    assert Path(cell["log"]).read_text()
    assert json.loads(Path(cell["child_command"].split()[-1]).read_text())["arm"] == "moira"


def test_steps_of_an_engine_under_torch_profiler(run):
    """Whole steps, as many as are said: an operator of each layer comes layers x steps times."""
    assert run("--arms", "dense-fa3,moira", "--shape", "256x2,500x1", "--reads", "0.6").exit_code == 0
    for arm in ("dense-fa3", "moira"):
        child = [sys.executable, "-c", CAPTURE, f"r/engines/{arm}-1.json", "500x1", "torch", f"p/{arm}"]
        profile = profilers.with_torch(child, Path("p") / arm, 1e3, "cpu")
        assert (profile["steps"], profile["layers"]) == ((TOKENS - 1) // 2, 3)
        calls = {kernel["name"]: kernel["calls"] for kernel in profile["kernels"]}
        assert calls["vllm::unified_attention_with_output"] == 3
        assert profile["uneven"] == {}
        assert profile["busy_us"] < profile["traced_us"]
    spec = json.loads(Path("r/engines/moira-1.json").read_text())
    Path("broken.json").write_text(json.dumps(spec | {"max_num_seqs": 0}))
    child = [sys.executable, "-c", CAPTURE, "broken.json", "500x1", "torch", "p/broken"]
    with pytest.raises(ProfilerError, match="The profiled process failed: ValidationError: .*See p/broken.log"):
        profilers.with_torch(child, Path("p/broken"), 1e3, "cpu")
