"""`moira profile e2e` with stand-ins for nsys, the engine and the process that captures its steps."""

import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from moira_cli import profiling, serving
from moira_cli.capture_engine import STEPS, Window
from moira_cli.errors import ProfilerError
from moira_cli.stages import classify
from tests import test_bench_e2e, test_profile
from tests.test_cli import moira, one_line, read_run
from tests.test_profile import profile_here

engine, tools = test_bench_e2e.engine, test_profile.tools

# Says what `moira_cli.capture_engine` says: 8 steps of 4 layers, 6 ms each.
CAPTURE = """
import json, os, sys
spec, label, way, output = sys.argv[1:]
assert label in [shape["label"] for shape in json.loads(open(spec).read())["shapes"]]
written = {"steps": 8, "layers": 4, "us": [6000.0]}
if failed := json.loads(os.environ.get("FAILED", "{}")).get(label):
    written = {"failed": failed}
open(output + ".json", "w").write(json.dumps(written))
"""


@pytest.fixture
def profile(engine, tools, monkeypatch):
    """The whole command; `moira bench e2e` runs in this process, where its engine is the stand-in."""

    def bench(target, options, folder):
        done = moira("bench", target, *options, "--run-dir", folder)
        return done.exit_code, (folder / "run.json").exists()

    monkeypatch.setattr(profiling, "bench", bench)
    monkeypatch.setattr(profiling, "CAPTURE_ENGINE", (sys.executable, "-c", CAPTURE))
    return lambda *arguments: moira("profile", "--nsys", "e2e", "--run-dir", "r", *arguments)


def test_stages_of_an_engines_step(profile, tools):
    result = profile("--arms", "moira", "--shape", "8kx32,130kx4")
    assert result.exit_code == 0, result.output
    run = read_run(Path("r"))
    assert run["config_resolved"]["launches"] == 1
    for number, (cell, arguments) in enumerate(zip(run["cells"], tools(), strict=True)):
        label, output = cell["shape"]["alias"], f"r/profiles/{number}-moira-graph"
        child = ["-c", CAPTURE, "r/engines/moira-1.json", label, "nsys", output]
        assert arguments[-len(child) - 3 :] == [
            "--trace-fork-before-exec=true", f"--output={output}", sys.executable, *child
        ]  # fmt: skip
        step = cell["profile"]
        assert (step["steps"], step["layers"], step["untraced_us"], step["traced_us"]) == (8, 4, 5000, 6000)
        assert step["overhead_pct"] == pytest.approx(20)
        assert {kernel["calls"] for kernel in step["kernels"]} == {4}
        assert step["stages"]["Attend"] == 0.6 * 6000
        assert [kernel["stage"] for kernel in step["timeline"]] == ["Estimate", "Select", "Attend", "Merge"]
    for text in ("an engine's decode steps", "32 requests of 8,192 tokens", "moira, per layer", "900.0"):
        assert text in result.stdout


def test_launches_are_put_together_and_profiled_once(profile, tools):
    assert profile("--arms", "moira", "--shape", "8kx32", "--launches", 2).exit_code == 0
    assert [("profile" in cell) for cell in read_run(Path("r"))["cells"]] == [True, False]
    assert len(tools()) == 1


def test_what_fails_is_said_and_the_measurement_kept(profile, monkeypatch):
    monkeypatch.setenv("FAILED", json.dumps({"130kx4": "OutOfMemoryError: 20 GiB"}))
    result = profile("--arms", "dense-fa3,moira", "--shape", "8kx32,130kx4")
    assert result.exit_code == 9
    reasons = [cell.get("reason") for cell in read_run(Path("r"))["cells"]]
    assert "dense-fa3: no kernel of FA3 was recorded, only _attend_balanced_kernel" in reasons[0]
    assert reasons[2] is None
    for reason, arm, number in ((reasons[1], "dense-fa3", 1), (reasons[3], "moira", 3)):
        log = f"r/profiles/{number}-{arm}-graph.log"
        assert reason == f"{arm}: The profiled process failed: OutOfMemoryError: 20 GiB. See {log}."
        assert f"moira: {reason}" in result.stderr.splitlines()
    cells = read_run(Path("r"))["cells"]
    assert [cell["status"] for cell in cells] == ["profile_failed", "profile_failed", "ok", "profile_failed"]
    assert [cell["tpot_ms"]["median"] for cell in cells] == [10, 10, 5, 5]


def test_an_arm_that_did_not_run_is_not_profiled(profile, engine, tools):
    engine({"dense-fa3": "fails"})
    assert profile("--arms", "dense-fa3,moira", "--shape", "8kx32").exit_code == 4
    cells = read_run(Path("r"))["cells"]
    assert [(cell["status"], "profile" in cell) for cell in cells] == [("error", False), ("ok", True)]


def test_report_of_a_profiled_engine(profile, tmp_path):
    assert profile("--arms", "moira", "--shape", "8kx32").exit_code == 0
    text = moira("report", "r").stdout
    assert "| 8kx32 | moira, per layer |" in text
    assert "_attend_balanced_kernel" in text
    assert moira("report", "r", "--format", "png", "--output", "p.png").exit_code == 0
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["p-stages.png", "p-timeline.png"]
    one_line(moira("report", "r", "--format", "html"), 2, "written as md, csv or json")


def test_every_arm_says_what_its_steps_must_show():
    assert set(profiling.NEEDED_STAGES_OF_ENGINES) == set(serving.ARMS)
    dense = {"kernels": [{"stage": "FA3", "name": "flash"}]}
    profiling.require_stages(profiling.NEEDED_STAGES_OF_ENGINES["dense-fa3"], dense)
    with pytest.raises(ProfilerError, match="no kernel of Estimate, Select, Attend, Merge was recorded, only flash"):
        profiling.require_stages(profiling.NEEDED_STAGES_OF_ENGINES["moira"], dense)
    assert {classify(name) for name in ("_count_kernel", "_table_kernel", "_compress_kernel")} == {"rest"}


def test_without_vllm_or_a_gpu(tmp_path, has_gpu):
    if has_gpu:
        pytest.skip("this machine has a GPU")
    done = profile_here(tmp_path, "e2e")
    assert done.returncode == 3
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("moira: 'moira bench e2e' needs ")
    assert not list(tmp_path.iterdir())


def stats_of(tokens):
    """What vLLM's scheduler reports of a step."""
    graph = SimpleNamespace(num_unpadded_tokens=tokens, num_padded_tokens=tokens, runtime_mode="FULL")
    return SimpleNamespace(cudagraph_stats=graph, kv_cache_usage=0.5)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tokens", [4, 5, 6, 10, 256])
@pytest.mark.parametrize("prefill", [[], [512], [512, 100, 3]])
def test_the_window_holds_whole_decode_steps(ahead, tokens, prefill):
    """However far the engine looks ahead, as many steps are launched under the profiler as are said."""
    sizes = [*prefill, *[4] * (tokens - 1)]
    launched, seen = 0, []

    @contextmanager
    def profiler():
        seen.append(launched)
        yield
        seen.append(launched)

    window = Window(tokens, 4, profiler)
    window.record(None, None)  # a step that ran nothing
    for done, size in enumerate(sizes, 1):
        launched = min(done + ahead, len(sizes))
        window.record(scheduler_stats=stats_of(size), iteration_stats=None, mm_cache_stats=None, engine_idx=0)
    start, end = seen
    assert end - start == window.count == min(STEPS, (tokens - 1) // 2)
    assert start > len(prefill)
    assert window.us > 0


def test_a_request_that_joins_in_the_window_is_refused():
    window = Window(10, 4, lambda: contextmanager(lambda: iter([None]))())
    for size in (4, 4, 4, 60, 4):
        window.record(stats_of(size), None)
    with pytest.raises(ValueError, match="requests joined or left"):
        window.record(stats_of(4), None)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["--torch", "--nsys"])
def test_engines_on_a_gpu(tmp_path, way):
    if way == "--nsys" and shutil.which("nsys") is None:
        pytest.skip("nsys is not installed")
    options = ["--shape", "8kx8", "--arms", "dense-fa3,moira", "--tokens", "64", "--repetitions", "2", "--allow-busy"]
    done = profile_here(tmp_path, way, "e2e", *options, "--run-dir", "r", timeout=1200)
    assert done.returncode == 0, done.stderr
    for cell in read_run(tmp_path / "r")["cells"]:
        step = cell["profile"]
        assert (step["steps"], step["layers"]) == (31, 32)
        assert step["unclassified_pct"] < 2
        assert step["stages"]["GEMM"] > 0
        assert 0.7 * step["untraced_us"] < step["busy_us"] <= 1.02 * step["traced_us"]
        attends = [kernel for kernel in step["kernels"] if kernel["stage"] in ("Attend", "FA3")]
        assert 32 in {kernel["calls"] for kernel in attends}
