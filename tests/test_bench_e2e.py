"""`moira bench e2e` against a stand-in engine: everything but vLLM itself (tests/test_serving_child.py has that)."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moira_cli import bench_e2e, environment, lists, models, serving, shapes
from tests.test_cli import moira, one_line, read_run

FAKE = Path(__file__).parent / "fake_engine.py"
GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "driver": "580",
    "sm": "sm_90",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def engine(monkeypatch):
    """A machine with a GPU and vLLM, whose engine is the stand-in; called with {arm: what goes wrong}."""
    env = {**environment.describe("cpu"), "device": "cuda", "gpu": GPU}
    monkeypatch.setattr(bench_e2e, "require_engine", lambda: (env, {}))
    monkeypatch.setattr(serving, "CHILD", (sys.executable, str(FAKE)))
    monkeypatch.setitem(serving.ARMS, "dense-flashinfer", serving.EngineArm("FLASHINFER", False, (), ""))
    return lambda what: monkeypatch.setenv("FAKE_ENGINE", json.dumps(what))


def e2e(*arguments):
    return moira("bench", "e2e", "--launches", 1, "--run-dir", "r", *arguments)


def by_arm(folder="r"):
    return {cell["arm"]: cell for cell in read_run(Path(folder))["cells"]}


def test_a_run_is_written_labelled_and_compared(engine):
    result = e2e("--arms", "dense-fa3,moira", "--shape", "8kx32,130kx4", "--launches", 2, "--output-json", "out.json")
    assert result.exit_code == 0, result.output
    run = read_run(Path("r"))
    assert run == json.loads(Path("out.json").read_text())
    assert (run["status"], run["exit_code"]) == ("complete", 0)
    order = [(cell["launch"], cell["arm"], cell["shape"]["alias"]) for cell in run["cells"]]
    assert order == [
        (launch, arm, shape)
        for launch, arms in ((1, ("dense-fa3", "moira")), (2, ("moira", "dense-fa3")))
        for arm in arms
        for shape in ("8kx32", "130kx4")
    ]
    assert len({cell["cell_id"] for cell in run["cells"]}) == 8
    for cell in run["cells"]:
        assert (cell["status"], cell["device"], cell["weights"]) == ("ok", "cuda", "dummy")
        assert cell["tpot_method"] == "request_timestamps"
        assert cell["cudagraph_mode"] == "FULL_AND_PIECEWISE"
        assert cell["kv_capacity_tokens"] == 900_000
        assert cell["child_command"].startswith("python -m moira_cli.serving_child r/engines/")
        assert Path(cell["child_command"].split()[-1]).exists()
        sparse = cell["arm"] == "moira"
        assert cell["tpot_ms"] == {"median": 5.0 if sparse else 10.0, "samples": [5.0 if sparse else 10.0] * 5}
        assert cell["page_read_fraction"] == (0.5 if sparse else 1.0)
        assert (cell["selection"] is None) == (not sparse)
    text = result.stdout
    assert "dummy weights" in text
    assert "scaled to a mean read fraction (paper's Table 3)" in " ".join(text.split())
    assert "request_timestamps" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("moira ")]
    assert len(rows) == 2
    assert rows[0][:5] == ["moira", "5.00", "0.0%", "2.00", "2.00-2.00"]


def test_the_child_gets_one_engine_for_all_shapes(engine):
    assert e2e("--suite", "paper", "--arms", "dense-fa3,moira", "--tokens", 128).exit_code == 0
    files = sorted(Path("r/engines").glob("*.json"))
    assert [file.stem for file in files] == ["dense-fa3-1", "moira-1"]
    dense, sparse = (json.loads(file.read_text()) for file in files)
    assert [shape["label"] for shape in sparse["shapes"]] == list(shapes.E2E_SUITES["paper"])
    assert sparse["capture_sizes"] == [1, 4, 8, 16, 32]
    assert (sparse["max_num_seqs"], sparse["max_model_len"]) == (32, 130_048 + 128)
    alike = set(dense) - {"arm", "backend", "settings", "shapes"}
    assert {name: dense[name] for name in alike} == {name: sparse[name] for name in alike}
    assert (dense["backend"], dense["settings"]) == ("FLASH_ATTN", None)
    assert (sparse["backend"], sparse["settings"]["policy"]) == ("CUSTOM", "profiled-count")
    assert json.loads((Path(sparse["model"]) / "config.json").read_text()) == models.PRESETS["llama-3.1-8b"]
    for shape in sparse["shapes"]:
        counts = np.array(shape["counts"])
        assert counts.shape == (32, 8)
        pages = -(-(shape["context_tokens"] + 64) // 64)
        reads, _ = shapes.paper_reads("llama-3.1-8b", shape["context_tokens"])
        assert abs(counts.mean() - reads * pages) <= 1


@pytest.mark.parametrize(
    ("what", "status", "parts"),
    [
        ("preempted", "invalid", ["requests were preempted", "KV cache is too small"]),
        ("no-graph", "invalid", ["246 replayed a full CUDA graph", "FULL, PIECEWISE"]),
        ("padded", "invalid", ["2 were padded"]),
        ("short", "invalid", ["8191 tokens came out, expected 32 x 256"]),
        ("uncached", "invalid", ["0 prompt tokens came from the prefix cache, expected 260096"]),
        ("apart", "invalid", ["decoded together in only 3 steps, expected 255"]),
        ("old-prompts", "invalid", ["the prompts were not new"]),
        ("dense-rows", "invalid", ["should be sparse: 2 dense, 40800 sparse"]),
        ("lost-rows", "invalid", ["0 dense, 4 sparse in each; expected none dense and at least 40640 sparse"]),
        ("unfit", "oom", ["needs 9 tokens of KV cache"]),
        (
            "fails",
            "error",
            ["ValueError: no such backend", "r/engines/moira-1.log", "python -m moira_cli.serving_child"],
        ),
        ("oom", "oom", ["OutOfMemoryError: 20 GiB"]),
        ("garbage", "error", ["not a line of the protocol: 'INFO hello'"]),
    ],
)
def test_what_an_engine_reports_becomes_a_status_and_a_reason(engine, what, status, parts):
    engine({"moira": what})
    result = e2e("--arms", "dense-fa3,moira", "--shape", "8kx32")
    one_line(result, 4, *parts)
    cells = by_arm()
    assert (cells["dense-fa3"]["status"], cells["moira"]["status"]) == ("ok", status)
    for part in parts:
        assert part in cells["moira"]["reason"]


def test_a_crash_in_the_middle_keeps_what_was_measured(engine):
    engine({"moira": "crash"})
    result = e2e("--arms", "moira", "--shape", "8kx32,64kx8,130kx4")
    assert result.exit_code == 4
    cells = read_run(Path("r"))["cells"]
    assert [cell["status"] for cell in cells] == ["ok", "error", "error"]
    assert "by signal SIGSEGV: RuntimeError: illegal memory access" in cells[1]["reason"]


def test_an_engine_that_leaves_early_or_goes_silent(engine):
    engine({"moira": "leaves", "dense-fa3": "silent"})
    start = time.monotonic()
    result = e2e("--shape", "8kx32,130kx4", "--timeout-s", 2, "--arms", "moira,dense-fa3")
    assert time.monotonic() - start < 60
    assert result.exit_code == 4
    cells = read_run(Path("r"))["cells"]
    assert [cell["status"] for cell in cells] == ["ok", "error", "timeout", "timeout"]
    assert "ended with code 0" in cells[1]["reason"]
    assert "no sign of life for 2 s" in cells[2]["reason"]


def test_a_shape_named_twice_is_measured_once(engine):
    assert e2e("--arms", "moira", "--shape", "8kx32,8kx32").exit_code == 0
    assert len(read_run(Path("r"))["cells"]) == 1


def test_flags_and_strict(engine):
    engine({"moira": "throttled"})
    assert e2e("--arms", "moira", "--shape", "8kx32").exit_code == 0
    assert by_arm()["moira"]["flags"] == ["T"]
    assert e2e("--arms", "moira", "--shape", "8kx32", "--strict", "--run-dir", "r2").exit_code == 8


def test_an_arm_without_its_library_is_a_row(engine, monkeypatch):
    arm = serving.EngineArm("FLASHINFER", False, (("no_such_library", "pip install it"),), "")
    monkeypatch.setitem(serving.ARMS, "dense-flashinfer", arm)
    result = e2e("--shape", "8kx32")
    one_line(result, 0, "dense-flashinfer: skipped - needs no_such_library (pip install it).")
    assert by_arm()["dense-flashinfer"]["status"] == "skipped_unsupported"


def test_coverage_arms_have_moiras_lists_and_another_attention(engine, monkeypatch):
    for name in ("fa3-coverage", "flashinfer-coverage"):
        monkeypatch.setitem(serving.ARMS, name, replace(serving.ARMS[name], needs=()))
    assert e2e("--arms", "all", "--shape", "8kx32").exit_code == 0
    specs = {path.stem: json.loads(path.read_text()) for path in Path("r/engines").glob("*.json")}
    assert {name: spec["layer"] for name, spec in specs.items()} == {
        "dense-fa3-1": None,
        "dense-flashinfer-1": None,
        "moira-1": None,
        "fa3-coverage-1": "fa3",
        "flashinfer-coverage-1": "flashinfer",
    }
    for name in ("fa3-coverage-1", "flashinfer-coverage-1"):
        assert specs[name] | {"arm": "moira", "layer": None} == specs["moira-1"]


def test_progress_shows_the_start_and_the_stages(engine):
    result = e2e("--arms", "moira", "--shape", "8kx32", "--progress", "plain")
    command = "python -m moira_cli.serving_child r/engines/moira-1.json"
    assert f"moira: moira-1: engine starting: {command} (log: r/engines/moira-1.log)" in result.stderr
    assert "engine up after 1 s, 900,000 tokens of KV cache, CUDA graphs: FULL_AND_PIECEWISE" in result.stderr
    assert "moira-1: 8kx32 prefill" in result.stderr
    assert not e2e("--arms", "moira", "--shape", "8kx32", "--progress", "none", "--run-dir", "r2").stderr


def test_without_reuse_the_time_is_that_of_steps(engine):
    assert e2e("--arms", "moira", "--shape", "8kx32", "--no-reuse-prefill").exit_code == 0
    assert by_arm()["moira"]["tpot_method"] == "engine_step"


def test_resume_measures_only_what_is_missing(engine):
    assert e2e("--arms", "dense-fa3,moira", "--shape", "8kx32,130kx4").exit_code == 0
    cells = read_run(Path("r"))["cells"]
    lines = Path("r/cells.jsonl").read_text().splitlines()
    Path("r/cells.jsonl").write_text("\n".join(lines[:3]) + "\n")
    result = moira("bench", "e2e", "--resume", "r")
    assert result.exit_code == 0, result.output
    again = read_run(Path("r"))["cells"]
    assert [cell["cell_id"] for cell in again] == [cell["cell_id"] for cell in cells]
    assert [shape["label"] for shape in json.loads(Path("r/engines/moira-1.json").read_text())["shapes"]] == ["130kx4"]
    one_line(moira("bench", "e2e", "--resume", "r", "--tokens", 8), 2, "--tokens 8 differs from the run in 'r' (256)")
    one_line(moira("bench", "kernel", "--resume", "r"), 2, "is not a run of 'moira bench kernel'")


def test_ctrl_c_leaves_a_valid_run_and_no_engine(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(FAKE.parent.parent)!r})
from moira_cli import bench_e2e, environment, serving
env = {{**environment.describe("cpu"), "device": "cuda", "gpu": {GPU!r}}}
bench_e2e.require_engine = lambda: (env, {{}})
serving.CHILD = (sys.executable, {str(FAKE)!r})
from moira_cli.main import app
app(["bench", "e2e", "--arms", "moira", "--shape", "8kx32,130kx4", "--launches", "1", "--run-dir", "r"])
"""
    variables = {**os.environ, "FAKE_ENGINE": json.dumps({"moira": "waits"})}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    cells = tmp_path / "r" / "cells.jsonl"
    deadline = time.monotonic() + 60
    while not (cells.exists() and cells.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Continue: moira bench e2e --resume r" in errors
    run = read_run(tmp_path / "r")
    assert (run["status"], [cell["status"] for cell in run["cells"]]) == ("cancelled", ["ok", "cancelled"])
    running = subprocess.run(["pgrep", "-f", str(tmp_path / "r" / "engines")], capture_output=True)
    assert running.returncode == 1, running.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--shape", "32x16k"], ["Did you mean 16kx32?"]),
        (["--shape", "256kx1"], ["256kx1: 262,144 + 256 tokens are more than the 131,072 of the engine"]),
        (["--shape", ","], ["--shape: expected at least one shape"]),
        (["--suite", "table4"], ["Did you mean 'table3'?"]),
        (["--suite", "table3", "--shape", "8kx1"], ["--suite names shapes"]),
        (["--arms", "mora"], ["Arm 'mora' is not known. Did you mean 'moira'?"]),
        (["--arms", ","], ["--arms: expected at least one arm"]),
        (["--relative-to", "moira", "--arms", "dense-fa3"], ["not among the arms"]),
        (["--reads", "31"], ["--reads: expected paper or a number in (0, 1], got '31'"]),
        (["--reads", "some"], ["--reads: expected paper or a number"]),
        (["--gamma", "0.98"], ["llama-3.1-8b has dummy weights"]),
        (["--gamma", "2"], ["--gamma: expected a number in (0, 1]"]),
        (["--model", "gpt-5"], ["Model 'gpt-5': expected llama-3.1-8b, qwen3-4b"]),
        (["--prompts", "text.txt"], ["dummy weights and no tokenizer"]),
        (["--lists", "missing.npz"], ["missing.npz"]),
        (["--kv-layout", "nhdd"], ["Did you mean 'nhd'?"]),
        (["--engine", "tgi"], ["--engine 'tgi' is not known"]),
        (["--tokens", "1"], ["--tokens"]),
        (["--output-json", "file/out.json"], ["cannot be written"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)
def test_wrong_input_is_one_line_and_leaves_nothing(tmp_path, engine, arguments, parts):
    (tmp_path / "file").write_text("")
    one_line(moira("bench", "e2e", *arguments), 2, *parts)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_a_machine_without_vllm_or_gpu_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    parts = ["pip install 'moira-attention[vllm]'", "a CUDA GPU", "--engine transformers"]
    one_line(moira("bench", "e2e"), 3, *parts)
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_reads_and_engine_starts(tmp_path):
    result = moira("bench", "e2e", "--suite", "table3", "--model", "qwen3-4b", "--dry-run")
    assert result.exit_code == 0
    assert "49.0%" in result.stdout
    assert "3 arms (dense-fa3, dense-flashinfer, moira) x 2 launches = 6 engine starts" in result.stdout.replace(
        "\n", ""
    )
    assert not list(tmp_path.iterdir())


def test_a_model_directory_with_weights_follows_the_coverage_rule(tmp_path, engine):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(models.PRESETS["qwen3-4b"]))
    one_line(moira("bench", "e2e", "--model", folder), 2, "holds no *.safetensors")
    (folder / "model.safetensors").touch()
    result = e2e("--model", folder, "--arms", "moira", "--shape", "8kx1")
    assert result.exit_code == 0, result.output
    assert "real weights" in result.stdout
    assert "page counts: the coverage rule, gamma 0.98" in result.stdout
    spec = json.loads(Path("r/engines/moira-1.json").read_text())
    assert (spec["settings"], spec["dummy_weights"], spec["model"]) == ({"gamma": 0.98}, False, str(folder))
    assert spec["shapes"][0]["counts"] is None
    one_line(moira("bench", "e2e", "--model", folder, "--gamma", 0.9, "--reads", 0.3), 2, "Leave one out")


def test_report_has_the_columns_of_steps(engine, tmp_path):
    engine({"dense-flashinfer": "fails"})
    assert e2e("--shape", "8kx32,130kx4", "--launches", 2).exit_code == 4
    rows = list(csv.DictReader(io.StringIO(moira("report", "r", "--format", "csv").stdout)))
    assert len(rows) == 6
    sparse = next(row for row in rows if row["arm"] == "moira")
    assert (float(sparse["tpot_ms"]), float(sparse["speedup"]), float(sparse["reads_pct"])) == (5.0, 2.0, 50.0)
    failed = next(row for row in rows if row["arm"] == "dense-flashinfer")
    assert (failed["tpot_ms"], failed["status"]) == ("", "error")
    assert "ValueError" in failed["reason"]
    text = moira("report", "r").stdout
    assert text.startswith("NVIDIA H200")
    assert text.count("\n| ") == 6 + 2
    assert json.loads(moira("report", "r", "--format", "json").stdout) == read_run(tmp_path / "r")
    one_line(moira("report", "r", "--format", "png", "--output", "p.png"), 2, "written as md, csv or json")


def test_two_runs_get_a_verdict(engine):
    assert e2e("--arms", "dense-fa3,moira", "--shape", "8kx32").exit_code == 0
    assert e2e("--arms", "dense-fa3,moira", "--shape", "8kx32", "--run-dir", "s").exit_code == 0
    result = moira("compare", "r", "s")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("SAME") >= 2
    assert "moira 8kx32" in result.stdout


@pytest.mark.parametrize("name", shapes.E2E_SUITES)
def test_suites_are_shapes(name):
    parsed = [shapes.parse_shape(text) for text in shapes.E2E_SUITES[name]]
    assert len(set(parsed)) == len(parsed)


def test_the_papers_shapes_and_reads():
    assert [shapes.parse_shape(text).batch for text in shapes.E2E_SUITES["table3"]] == [32, 32, 16, 8, 4]
    assert [shapes.parse_shape(text).context_tokens for text in shapes.E2E_SUITES["batch1"]] == [
        2048 * 2**n for n in range(6)
    ]
    assert shapes.paper_reads("qwen3-4b-thinking", 130_048) == (0.21, "paper's Table 3")
    below = [shapes.paper_reads("llama-3.1-8b", tokens)[0] for tokens in (1024, 2048, 4096, 8192)]
    assert below == pytest.approx([0.57, 0.52, 0.47, 0.42])
    between, source = shapes.paper_reads("llama-3.1-8b", 24 * 1024)
    assert 0.31 < between < 0.37
    assert source.startswith("within")
    assert shapes.paper_reads("llama-3.1-8b", 131_072)[0] == 0.15


@pytest.mark.parametrize("name", models.PRESETS)
def test_presets_are_geometries(name):
    config = models.PRESETS[name]
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    assert tuple(config[each] for each in names) == shapes.GEOMETRIES[name]


@pytest.mark.parametrize("reads", [0.001, 0.05, 0.31, 0.9, 1.0])
@pytest.mark.parametrize("pages", [1, 2, 34, 512, 2034])
def test_scaled_profile_hits_its_mean_to_the_page(reads, pages):
    recorded = lists.load_recorded(lists.SHIPPED)
    counts = lists.profiled_counts(recorded, 32, 8, pages, reads, seed=0)
    least = lists.forced_pages(pages)
    assert counts.shape == (32, 8)
    assert counts.min() >= least
    assert counts.max() <= pages
    assert counts.sum() == np.clip(round(reads * pages * 256), least * 256, pages * 256)
    if reads == 0.31 and pages == 512:
        assert 0.2 < lists.coefficient_of_variation(counts) < 1.5
        assert not np.array_equal(counts, lists.profiled_counts(recorded, 32, 8, pages, reads, seed=1))
