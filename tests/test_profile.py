"""`moira profile` with stand-ins for nsys and ncu that record their arguments and run what they are given."""

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import baselines
from baselines.moira_layer import MoiraLayer
from moira_cli import profilers, profiling
from moira_cli.errors import ExitCode, ProfilerError
from moira_cli.records import exit_code
from moira_kernels import attention, ranges
from moira_kernels.testing import Geometry, assert_close, make_case
from tests.test_baselines import RAGGED, ragged_lists
from tests.test_cli import ENVIRONMENT, TINY, bench, moira, one_line, read_run
from tests.test_report import PNG

ROOT = Path(__file__).resolve().parent.parent

STAND_IN = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA Nsight, a stand-in\\nversion 1.2.3")
    sys.exit()
with open(os.environ["RECORDED"], "a") as file:
    file.write(json.dumps(arguments) + "\\n")
"""
NSYS = """
from tests.nsys_export import layer_kernels, write
output = Path(next(a for a in arguments if a.startswith("--output=")).removeprefix("--output="))
child = arguments[arguments.index(f"--output={output}") + 1:]
code = subprocess.run(child).returncode
behaviour = os.environ.get("STAND_IN")
if code == 0 and behaviour != "nothing":
    written = json.loads(Path(f"{output}.json").read_text())
    layers, us = written["layers"], sum(written["us"]) / len(written["us"])
    kernels = layer_kernels(written["steps"] * layers, step_us=us / layers)
    Path(f"{output}.nsys-rep").write_text("report")
    write(Path(f"{output}.sqlite"), kernels, graphs=3 if behaviour == "graphs" else 0)
sys.exit(code)
"""
NCU = """
from tests.test_traces import LAUNCHES, raw_page
behaviour = os.environ.get("STAND_IN")
if "--import" in arguments:
    print("==WARNING== No kernels were profiled." if behaviour == "nothing" else raw_page(*LAUNCHES))
    sys.exit()
output = arguments[arguments.index("--export") + 1]
if behaviour == "permission":
    print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters")
    sys.exit(1)
subprocess.run(arguments[arguments.index(output) + 1:], check=True)
Path(f"{output}.ncu-rep").write_text("report")
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Stand-ins on the PATH, and their arguments, a list per call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in (("nsys", NSYS), ("ncu", NCU)):
        path = folder / name
        path.write_text(STAND_IN + body)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RECORDED", str(tmp_path / "recorded"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda: [json.loads(line) for line in (tmp_path / "recorded").read_text().splitlines()]


def child_that_writes(output, steps=20, us=100.0):
    """A process that says what `moira_cli.capture` says."""
    text = json.dumps({"steps": steps, "layers": 1, "us": [us]})
    return [sys.executable, "-c", f"open({str(output) + '.json'!r}, 'w').write({text!r})"]


def test_nsys_command_and_what_comes_back(tools, tmp_path):
    output = tmp_path / "p" / "0-moira"
    child = child_that_writes(output)
    profile = profilers.with_nsys(child, output, 90.0, ("--trace-fork-before-exec=true",))
    (arguments,) = tools()
    assert arguments == [
        "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--export=sqlite", "--force-overwrite=true",
        "--trace-fork-before-exec=true", f"--output={output}", *child,
    ]  # fmt: skip
    assert shlex.split(profile["command"])[1:] == arguments
    assert Path(profile["report"]).read_text() == "report"
    assert (profile["steps"], profile["traced_us"], profile["untraced_us"]) == (20, 100, 90)
    assert profile["stages"]["Attend"] == 60
    assert profile["command"] in Path(f"{output}.log").read_text()


def test_nsys_brings_back_nothing(tools, tmp_path, monkeypatch):
    output = tmp_path / "x"
    monkeypatch.setenv("STAND_IN", "nothing")
    with pytest.raises(ProfilerError, match="no report: the capture range never opened.*Command: .*nsys profile"):
        profilers.with_nsys(child_that_writes(output), output, 90.0)
    monkeypatch.setenv("STAND_IN", "graphs")
    with pytest.raises(ProfilerError, match="recorded 3 CUDA graphs as a whole"):
        profilers.with_nsys(child_that_writes(output), output, 90.0)


def test_earlier_results_are_not_taken_for_new_ones(tools, tmp_path, monkeypatch):
    output = tmp_path / "x"
    profilers.with_nsys(child_that_writes(output), output, 90.0)
    with pytest.raises(ProfilerError, match="The profiled process failed .exit 3.: out of luck See .*x.log"):
        profilers.with_nsys([sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"], output, 90.0)
    assert not Path(f"{output}.sqlite").exists()


def test_ncu_command_and_what_comes_back(tools, tmp_path):
    output = tmp_path / "0-moira"
    profile = profilers.with_ncu(child_that_writes(output), output)
    collect, page = tools()
    assert collect[:5] == ["--clock-control", "none", "--profile-from-start", "off", "--force-overwrite"]
    assert "launch__registers_per_thread" in collect[collect.index("--metrics") + 1].split(",")
    assert page == ["--import", f"{output}.ncu-rep", "--csv", "--page", "raw", "--print-units", "base"]
    assert [kernel["stage"] for kernel in profile["kernels"]] == ["Attend", "Merge"]


@pytest.mark.parametrize(("behaviour", "text"), [("permission", "SYS_ADMIN"), ("nothing", "recorded no kernels")])
def test_ncu_without_permission_or_kernels(tools, tmp_path, monkeypatch, behaviour, text):
    monkeypatch.setenv("STAND_IN", behaviour)
    with pytest.raises(ProfilerError, match=text) as caught:
        profilers.with_ncu(child_that_writes(tmp_path / "x"), tmp_path / "x")
    assert caught.value.code == 9
    assert "\n" not in str(caught.value)


def run_as_if_on_a_gpu(monkeypatch, *arguments):
    """The whole command on CPU arms: measured and captured for real, only the tool is a stand-in."""
    monkeypatch.setattr(profiling, "require_gpu", lambda way, device: None)
    monkeypatch.setattr(sys, "argv", ["moira", "profile", *arguments])
    options = ["--shape", "512x1", "--arms", "sparse-torch", *TINY, "--run-dir", "r"]
    return moira("profile", *arguments, *options)


def test_profile_with_nsys_end_to_end(tools, tmp_path, monkeypatch):
    result = run_as_if_on_a_gpu(monkeypatch, "--nsys", "kernel")
    assert result.exit_code == 0, result.output
    run = read_run(tmp_path / "r")
    assert run["profiler"] == {"way": "nsys", "version": "version 1.2.3"}
    assert run["repro_command"] == "moira profile --nsys kernel"
    (cell,) = run["cells"]
    profile = cell["profile"]
    (arguments,) = tools()
    assert arguments[-6:] == ["-m", "moira_cli.capture", "r", "0", "nsys", "r/profiles/0-sparse-torch-eager"]
    assert profile["untraced_us"] == cell["timing"]["cpu_us"]["median"]
    assert profile["steps"] >= 10
    assert profile["stages"]["Attend"] == pytest.approx(12 * profile["stages"]["Select"])
    for text in ("Attend", "Estimate", "unclassified", "overhead", profile["report"], profile["command"]):
        assert text in result.stdout


def test_missing_stage_of_our_arm_fails(monkeypatch):
    kernels = [{"stage": "Attend", "name": "_attend_balanced_kernel"}]
    with pytest.raises(ProfilerError, match="no kernel of Merge was recorded, only _attend_balanced_kernel"):
        profiling.require_stages(profiling.NEEDED_STAGES["moira"], {"kernels": kernels})
    profiling.require_stages(("Attend",), {"kernels": kernels})
    profiling.require_whole({"steps": 10, "uneven": {}})
    with pytest.raises(ProfilerError, match="in 10 equal steps there are x 9 times"):
        profiling.require_whole({"steps": 10, "uneven": {"x": 9}})


def test_failed_profile_keeps_the_measurement_and_exits_9(tools, tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN", "permission")
    result = run_as_if_on_a_gpu(monkeypatch, "--ncu")
    one_line(result, 9, "sparse-torch: ncu may not read the GPU's counters", "--cap-add=SYS_ADMIN", "--nsys")
    (cell,) = read_run(tmp_path / "r")["cells"]
    assert cell["status"] == "profile_failed"
    assert cell["timing"]["cpu_us"]["median"] > 0


def test_exit_codes():
    def code(*statuses):
        return exit_code([{"status": status} for status in statuses])

    assert code("profile_failed", "profile_failed") == ExitCode.PROFILER == 9
    assert code("ok", "profile_failed", "skipped_unsupported") == 9
    assert code("ok", "profile_failed", "error") == ExitCode.PARTIAL
    assert code("oom", "error") == ExitCode.NO_CELL


WRONG = [
    (["--nsys"], 9, ["nsys is not on the PATH", "Install Nsight Systems", "--torch"]),
    (["--ncu", "kernel"], 9, ["ncu is not on the PATH", "Install Nsight Compute"]),
    (["--nsys", "--torch"], 2, ["--nsys and --torch: choose one"]),
    (["--ncu", "e2e"], 2, ["--ncu", "too slow for an engine", "moira profile --ncu kernel"]),
    (["e2e", "--torch", "--engine", "transformers"], 2, ["--engine transformers", "vLLM's decode steps"]),
    (["e2e", "--engine=transformers"], 2, ["--engine transformers", "vLLM's decode steps"]),
    (["--resume", "r"], 2, ["--resume", "new run"]),
    (["--output-json", "file/out.json"], 2, ["--output-json 'file/out.json' cannot be written"]),
]


@pytest.mark.parametrize(
    ("arguments", "code", "parts"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, list) else None
)
def test_wrong_input_is_one_line_and_runs_nothing(tmp_path, monkeypatch, arguments, code, parts):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "file").write_text("")
    one_line(moira("profile", *arguments), code, *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nsys_without_a_gpu(tools, has_gpu):
    if has_gpu:
        pytest.skip("this machine has a GPU")
    one_line(moira("profile", "--nsys"), 3, "--nsys records CUDA kernels", "on the cpu", "torch.profiler")


def profile_here(folder, *arguments, timeout=300):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "moira_cli.main", "profile", *arguments]
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    arguments = ["kernel", "--shape", "2kx1", "--arms", "sparse-torch,dense-torch", *TINY, "--run-dir", "r"]
    done = profile_here(folder, *arguments, "--torch", "--output-json", "-")
    assert done.returncode == 0, done.stderr
    return folder / "r", done


def test_torch_on_a_cpu(cpu_run):
    folder, done = cpu_run
    run = json.loads(done.stdout)
    assert run == read_run(folder)
    assert run["profiler"]["way"] == "torch"
    assert "device: cpu" in done.stderr
    assert "operators on the CPU" in done.stderr
    for cell in run["cells"]:
        profile = cell["profile"]
        assert profile["stages"]["SDPA"] > 0
        assert profile["unclassified_pct"] == 0
        assert profile["busy_us"] > 0
        assert profile["gaps_us"] > -0.05 * profile["busy_us"]
        assert (folder.parent / profile["report"]).exists()
        assert profile["command"].endswith(f"torch r/profiles/{run['cells'].index(cell)}-{cell['arm']}-eager")


def test_report_and_pictures_of_a_profile(cpu_run, tmp_path, monkeypatch):
    folder, _ = cpu_run
    monkeypatch.chdir(tmp_path)
    assert moira("report", folder, "--format", "png", "--output", "p.png").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p-stages.png", "p-timeline.png"]
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.iterdir())
    page = moira("report", folder, "--format", "html").stdout
    assert page.count("<img ") == 2
    assert page.count("<table>") == 4
    text = moira("report", folder).stdout
    assert "| shape | arm | step us | SDPA | rest | unclassified | gaps | untraced us | overhead |" in text
    assert "aten::scaled_dot_product_attention" in text


def test_bench_reports_its_own_errors(tmp_path):
    done = profile_here(tmp_path, "--torch", "kernel", "--shape", "32x16k")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "moira: Shape '32x16k' not understood. Use CONTEXTxBATCH, e.g. 32kx16 (32,768 tokens x 16 requests). "
        "Did you mean 16kx32?"
    )
    assert not list(tmp_path.iterdir())


def test_ranges_of_a_measurement(monkeypatch, tmp_path):
    """What a profiler sees: domain moira, nested push/pop ranges with the arm and the shape in the outer one."""
    monkeypatch.chdir(tmp_path)
    seen, depth = [], [0]

    class Annotate:
        def __init__(self, message, domain):
            assert domain == "moira"
            self.message = message

        def __enter__(self):
            seen.append((depth[0], self.message))
            depth[0] += 1

        def __exit__(self, *_):
            depth[0] -= 1

    monkeypatch.setattr(ranges, "nvtx", type("nvtx", (), {"annotate": Annotate}))
    ranges.annotate.cache_clear()
    result = bench("--shape", "512x1", "--arms", "sparse-torch")
    ranges.annotate.cache_clear()
    assert result.exit_code == 0, result.output
    (_, outer), *inner = seen
    assert outer.startswith("bench/sparse-torch/512x1/nhd/cv=")
    assert [message for level, message in dict.fromkeys(inner) if level == 1] == ["plan", "check", "warm-up", "replays"]


def test_without_nvtx_nothing_is_annotated(monkeypatch):
    monkeypatch.setattr(ranges, "nvtx", None)
    ranges.annotate.cache_clear()
    with ranges.annotate("a"), ranges.annotate("a"):
        pass
    ranges.annotate.cache_clear()


def test_layer_arm_attends_the_given_lists(device):
    q, kv = make_case(RAGGED, Geometry(6, 2, 32), device=device)
    pages = ragged_lists(q, kv)
    arm = MoiraLayer(q, kv, pages)
    arm.run()
    truth = attention.reference(q, kv, pages)[0]
    assert_close(arm.out, truth, attention.reference(q, kv, pages, dtype=q.dtype)[0])
    assert 0 < arm.layer.pages.lengths.sum() < baselines.all_pages(kv).lengths.sum()


def check_gpu_profile(folder, *ways):
    """All stages, whole records, known kernels, and their time that of the step."""
    shape = ["--shape", "8kx8", "--arms", "moira-layer,moira,moira-eq4,dense-torch", "--allow-busy"]
    done = profile_here(folder, "kernel", *shape, "--run-dir", "r", *ways)
    assert done.returncode == 0, done.stderr
    cells = {cell["arm"]: cell["profile"] for cell in read_run(folder / "r")["cells"]}
    for arm, stages in profiling.NEEDED_STAGES.items():
        times = {stage: us for stage, us in cells[arm]["stages"].items() if us}
        assert set(stages) <= set(times)
        assert cells[arm]["unclassified_pct"] == 0
        assert 0.7 * cells[arm]["untraced_us"] < cells[arm]["busy_us"] <= 1.02 * cells[arm]["traced_us"]
        assert sum(times.values()) > 0.95 * cells[arm]["busy_us"]
        order = [kernel["stage"] for kernel in cells[arm]["timeline"]]
        assert [stage for stage in order if stage in stages] == list(stages)
    assert cells["dense-torch"]["unclassified_pct"] < 2


@pytest.mark.gpu
def test_torch_on_a_gpu(tmp_path):
    check_gpu_profile(tmp_path, "--torch")


@pytest.mark.gpu
def test_nsys_on_a_gpu(tmp_path):
    if shutil.which("nsys") is None:
        pytest.skip("nsys is not installed")
    check_gpu_profile(tmp_path, "--nsys")


@pytest.mark.gpu
def test_ncu_on_a_gpu(tmp_path):
    if shutil.which("ncu") is None:
        pytest.skip("ncu is not installed")
    done = profile_here(tmp_path, "--ncu", "--shape", "8kx8", "--arms", "moira", "--allow-busy", "--run-dir", "r")
    if "ERR_NVGPUCTRPERM" in done.stderr:
        assert done.returncode == 9
        pytest.skip("no permission to read the counters")
    assert done.returncode == 0, done.stderr
    kernels = read_run(tmp_path / "r")["cells"][0]["profile"]["kernels"]
    assert [kernel["stage"] for kernel in kernels] == ["Attend", "Merge"]
    assert 0.1 < kernels[0]["dram_tbps"] < 5
    assert all(0 < kernel["occupancy_pct"] <= 100 and kernel["registers"] > 0 for kernel in kernels)
