"""`moira bench e2e --engine transformers`: real decoding on the CPU."""

from pathlib import Path

import pytest

from moira_cli import models
from moira_cli.errors import CliError
from tests.test_cli import moira, one_line, read_run
from tests.test_record import model_folder  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def try_out(*arguments):
    return moira("bench", "e2e", "--engine", "transformers", "--run-dir", "r", *arguments)


def test_every_page_kept_is_dense_attention(model_folder):  # noqa: F811
    result = try_out("--model", model_folder, "--shape", "300x1", "--gamma", 1, "--tokens", 6)
    assert result.exit_code == 0, result.output
    assert "a try-out on the CPU, no GPU time" in result.stdout
    assert "cpu ms" in result.stdout
    assert "TPOT ms" not in result.stdout
    assert "…" not in result.stdout
    dense, sparse = read_run(Path("r"))["cells"]
    assert (dense["arm"], sparse["arm"]) == ("dense-torch", "sparse-torch")
    for cell in (dense, sparse):
        assert (cell["status"], cell["device"], cell["tpot_method"]) == ("ok", "cpu", "cpu_wall")
        assert (cell["weights"], cell["mode"]) == ("real", "eager")
        assert len(cell["tpot_ms"]["samples"]) == 2
        assert cell["page_read_fraction"] == 1.0
    assert sparse["agreement"]["same_token"] == 1.0
    assert sparse["agreement"]["kl_max"] < 1e-3


def test_fewer_pages_are_read_and_change_the_output(model_folder):  # noqa: F811
    result = try_out("--model", model_folder, "--shape", "300x1", "--gamma", 0.3, "--arms", "sparse-torch")
    assert result.exit_code == 0, result.output
    (cell,) = read_run(Path("r"))["cells"]
    # Two of five pages are always kept.
    assert 0.4 <= cell["page_read_fraction"] < 1
    assert cell["agreement"]["kl_mean"] > 1e-5
    assert moira("report", "r").exit_code == 0


def test_small_real_model():
    try:
        models.default_weights()
    except CliError as error:
        pytest.skip(str(error))
    result = try_out("--shape", "256x1", "--tokens", 4, "--repetitions", 1)
    assert result.exit_code == 0, result.output
    dense, sparse = read_run(Path("r"))["cells"]
    assert dense["status"] == sparse["status"] == "ok"
    assert 0.4 <= sparse["page_read_fraction"] <= 1
    assert sparse["agreement"]["kl_mean"] < 0.5


def test_wrong_settings_are_one_line(model_folder, tmp_path):  # noqa: F811
    one_line(try_out("--shape", "1kx2"), 2, "decodes one request")
    one_line(try_out("--reads", 0.3), 2, "--reads is for vLLM")
    one_line(try_out("--launches", 2), 2, "runs once")
    one_line(try_out("--arms", "moira"), 2, "Arm 'moira' is not known", "sparse-torch")
    one_line(try_out("--prompts", "no.txt"), 2, "Text 'no.txt' cannot be read")
    assert not (tmp_path / "r").exists()
    one_line(try_out("--model", model_folder, "--shape", "8kx1"), 5, "8kx1", "504 tokens")
