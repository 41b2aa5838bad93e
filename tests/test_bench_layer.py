"""`moira bench layer`: what it says without a GPU, and a small run on one."""

import json

import pytest
from typer.testing import CliRunner

from moira_cli.main import app
from tests.test_cli import one_line


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "layer", *map(str, arguments)])


def test_without_a_gpu_it_says_what_is_missing(has_gpu):
    if has_gpu:
        pytest.skip("there is a GPU")
    one_line(run(), 3, "needs a CUDA GPU", "moira verify")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--shape", "32x16k"], ["Did you mean 16kx32?"]),
        (["--kv-layout", "hdn"], ["expected nhd or hnd, got 'hdn'"]),
        (["--gamma", "2"], ["--gamma"]),
    ],
)
def test_wrong_input_is_one_line(arguments, parts):
    one_line(run(*arguments), 2, *parts)


@pytest.mark.gpu
def test_every_stage_has_a_time_and_a_reason_otherwise():
    result = run("--shape", "2kx1,512x3", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 2 * 7
    for row in rows:
        assert ("reason" in row) != ("kernel_us" in row)
        if "kernel_us" in row:
            assert row["kernel_us"]["median"] > 0
    times = {row["stage"]: row["kernel_us"]["median"] for row in rows[:5]}
    assert times["layer"] > max(times["estimate + select"], times["attend + merge"])
