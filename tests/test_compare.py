"""`moira compare`: verdicts on saved runs, and live runs on a machine without a GPU."""

import copy
import json

import numpy as np
import pytest

import baselines
from moira_cli import compare as module
from tests.test_cli import TINY, moira, one_line, read_run


@pytest.fixture(autouse=True)
def quick_and_elsewhere(tmp_path, monkeypatch):
    """Child processes take their options from the environment, as a user's would."""
    monkeypatch.chdir(tmp_path)
    for name, value in zip(TINY[::2], TINY[1::2], strict=True):
        monkeypatch.setenv("MOIRA_BENCH_KERNEL_" + name.removeprefix("--").replace("-", "_").upper(), value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def saved_run(path, factor=1.0, spread=0.001, launches=3):
    """A run of two arms, written by hand: 100 and 200 us times ``factor``, some launches of 30 samples."""
    rng = np.random.default_rng(round(factor * 1000))
    cells = []
    for arm, us in (("moira", 100.0), ("fa3-varlen", 200.0)):
        samples = [(us * factor * (1 + spread * rng.standard_normal(30))).tolist() for _ in range(launches)]
        cells.append(
            {
                "arm": arm,
                "mode": "graph",
                "device": "cuda",
                "shape": {"alias": "32kx16"},
                "cv_nominal": 1.0,
                "lists_digest": "d",
                "status": "ok",
                "timing": {
                    "kernel_us": {"launches": samples, "samples": samples[0]},
                    "plan": {"scope": "layer"},
                    "total_us": float(np.median(samples)),
                },
            }
        )
    env = {
        "device": "cuda",
        "cpu": "x",
        "cpu_threads": 1,
        "gpu": {"name": "NVIDIA H200", "driver": "1"},
        "libraries": {"torch": "2.13", "triton": "3.7"},
    }
    path.write_text(json.dumps({"env": env, "config_resolved": {"mode": "graph"}, "cells": cells}))
    return path


def verdicts(result):
    return [row["verdict"] for row in json.loads(result.stdout)["rows"]]


def test_a_run_against_itself_is_the_same(tmp_path):
    path = saved_run(tmp_path / "a.json")
    result = moira("compare", path, path, "--output-json", "-", "--fail-on", "slower:0%")
    assert result.exit_code == 0
    assert verdicts(result) == ["SAME", "SAME"]
    assert "2 SAME" in result.stderr


@pytest.mark.parametrize(
    ("factor", "spread", "word"),
    [(1.1, 0.001, "SLOWER"), (0.9, 0.001, "FASTER"), (1.002, 0.001, "SAME"), (1.03, 0.2, "UNCLEAR")],
)
def test_verdicts(tmp_path, factor, spread, word):
    a, b = saved_run(tmp_path / "a.json", 1.0, spread), saved_run(tmp_path / "b.json", factor, spread)
    result = moira("compare", a, b, "--output-json", "-")
    assert result.exit_code == 0
    assert verdicts(result) == [word, word]


@pytest.mark.parametrize(("limit", "code"), [("slower:3%", 7), ("slower:12", 0)])
def test_a_planted_slow_run_trips_the_gate(tmp_path, limit, code):
    a, b = saved_run(tmp_path / "a.json"), saved_run(tmp_path / "b.json", 1.1)
    result = moira("compare", a, b, "--fail-on", limit)
    assert result.exit_code == code
    assert ("2 cells are slower" in result.stderr) == (code == 7)


def test_unlike_runs_are_refused_unless_told(tmp_path):
    a, b = saved_run(tmp_path / "a.json"), saved_run(tmp_path / "b.json")
    other = json.loads(b.read_text())
    other["env"]["gpu"]["name"] = "NVIDIA H100"
    other["config_resolved"]["mode"] = "eager"
    b.write_text(json.dumps(other))
    one_line(moira("compare", a, b), 2, "device: NVIDIA H200 / NVIDIA H100", "mode: graph / eager", "--allow-unlike")
    result = moira("compare", a, b, "--allow-unlike")
    assert result.exit_code == 0
    assert "! not alike: device" in result.stdout


def test_cells_without_a_time_or_partner_stay_in_the_table(tmp_path):
    a, b = saved_run(tmp_path / "a.json"), saved_run(tmp_path / "b.json", launches=1)
    other = json.loads(b.read_text())
    other["cells"][0] |= {"status": "wrong_result", "reason": "off"}
    other["cells"].append(copy.deepcopy(other["cells"][1]) | {"arm": "padding"})
    b.write_text(json.dumps(other))
    result = moira("compare", a, b)
    assert "B: wrong_result" in result.stdout
    assert "not in run A" in result.stdout
    assert "2 NO TIME" in result.stdout
    assert "Fewer than three launches" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["a.json"], ["two saved runs", "got 1"]),
        (["a.json", "missing"], ["Run 'missing' cannot be read"]),
        (["a.json", "list.json"], ["is not a moira run"]),
        (["a.json", "a.json", "--fail-on", "slow:3"], ["expected slower:PERCENT"]),
        (["--fail-on", "slower:3%"], ["name them"]),
        (["--baselines", "mora"], ["Did you mean 'moira'?"]),
        (["--skip", "mora"], ["Did you mean 'moira'?"]),
        (["--suite", "tabel6"], ["Did you mean 'table6'?"]),
        (["--suite", "missing.toml"], ["cannot be read"]),
        (["--suite", "empty.toml"], ["at least one [[run]] table"]),
        (["--suite", "odd.toml"], ["Suite option 'shapes'", "Did you mean 'shape'?"]),
        (["--shape", "32x16k"], ["Did you mean 16kx32?"]),
    ],
)
def test_wrong_input_is_one_line(tmp_path, arguments, parts):
    saved_run(tmp_path / "a.json")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "odd.toml").write_text('[[run]]\nshapes = "32kx16"\n')
    one_line(moira("compare", *arguments, "--progress", "none"), 2, *parts)


def test_live_run_holds_every_arm_over_all_launches(tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[[run]]\nshape = "512x2"\ncv = "0,1"\n[[run]]\nshape = "512x1"\nlists = "real"\n'
    )
    result = moira("compare", "--suite", "mine.toml", "--launches", "3", "--run-dir", "r", "--output-json", "out.json")
    assert result.exit_code == 0, result.output
    run = read_run(tmp_path / "r")
    assert run == json.loads((tmp_path / "out.json").read_text())
    assert len(run["cells"]) == 3 * len(baselines.names())
    for cell in run["cells"]:
        if cell["arm"].endswith("torch"):
            assert cell["status"] == "ok"
            assert len(cell["timing"]["cpu_us"]["launch_medians"]) == 3
            assert cell["timing"]["cpu_us"]["spread_pct"] >= 0
        else:
            assert cell["status"] == "skipped_unsupported"
            assert "needs a CUDA GPU" in cell["reason"]
    orders = [read_run(tmp_path / "r" / f"launch-{i}" / "0")["config_resolved"]["arms"].split(",") for i in (1, 2)]
    assert orders[0] == orders[1][::-1] == baselines.names()
    assert moira("compare", "r", "r").exit_code == 0
    one_line(moira("compare", "--run-dir", "r"), 2, "already holds a run")


def test_an_interrupted_comparison_is_a_valid_run_and_goes_on(tmp_path, monkeypatch):
    whole = module.run_launches

    def interrupted(plan, folder, progress):
        yield next(whole(plan, folder, progress))
        # A kill in the middle of the second launch: its first cell only.
        second = folder / "launch-2" / "0"
        module._bench_kernel(second, plan.runs[0], plan.arms[::-1], "launch 2", progress)
        document = json.loads((second / "run.json").read_text())
        (second / "run.json").write_text(json.dumps({**document, "status": "running", "cells": []}))
        lines = (second / "cells.jsonl").read_text().splitlines(keepends=True)
        (second / "cells.jsonl").write_text(lines[0])
        raise KeyboardInterrupt

    arms = ["sparse-torch", "dense-torch"]
    command = ["compare", "--arms", ",".join(arms), "--shape", "512x1", "--launches", "2", "--run-dir", "r"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "run_launches", interrupted)
        result = moira(*command)
    assert result.exit_code == 130
    assert "Stopped after 1/2 launches" in result.stderr
    run = read_run(tmp_path / "r")
    assert (run["status"], run["config_resolved"]["launches"]) == ("cancelled", 1)

    kept = json.loads((tmp_path / "r" / "launch-2" / "0" / "cells.jsonl").read_text())
    result = moira("compare", "--resume", "r")
    assert result.exit_code == 0, result.output
    run = read_run(tmp_path / "r")
    assert (run["status"], run["config_resolved"]["launches"]) == ("complete", 2)
    assert [cell["arm"] for cell in run["cells"]] == arms
    for cell in run["cells"]:
        assert len(cell["timing"]["cpu_us"]["launch_medians"]) == 2
    measured = next(cell for cell in run["cells"] if cell["arm"] == kept["arm"])
    assert measured["timing"]["cpu_us"]["launches"][1] == kept["timing"]["cpu_us"]["samples"]
    one_line(moira("compare", "--resume", "nowhere"), 2, "is not the folder of a live 'moira compare'")


def test_launches_and_their_samples_both_widen_the_interval():
    steady = [[100.0 + i % 2 for i in range(30)]] * 3
    apart = [[x + 20 * k for x in steady[0]] for k in range(3)]
    width = [np.ptp(np.percentile(module.bootstrap_medians(launches, 0), (2.5, 97.5))) for launches in (steady, apart)]
    assert width[0] <= 1
    assert width[1] >= 20


def test_a_wrong_arm_is_not_ranked_and_sets_the_exit_code(tmp_path, monkeypatch):
    good = {
        "arm": "sparse-torch",
        "mode": "eager",
        "device": "cpu",
        "status": "ok",
        "flags": [],
        "check": {"max_abs": 0.0},
        "work": {"useful_bytes": 1, "moved_bytes": 1, "read_us": None, "sol_pct": None},
        "timing": {"cpu_us": {"samples": [1.0, 2.0]}, "plan": {"scope": "layer"}, "total_us": 1.5},
    }
    bad = {**good, "arm": "dense-torch", "status": "wrong_result", "reason": "wrong result: planted"}
    documents = [{"cells": [good, bad]}, {"cells": [{**bad, "status": "ok"}, good]}]
    merged = {cell["arm"]: cell for cell in module.merge_launches(documents)}
    assert merged["sparse-torch"]["status"] == "ok"
    assert merged["dense-torch"]["status"] == "wrong_result"
    from moira_cli.records import exit_code

    assert exit_code(list(merged.values())) == 6
