import json

import pytest

from moira_cli.errors import CliError, ExitCode
from moira_cli.records import Run, cell_id, dumps, exit_code, header, redact, require_writable


def cells(*statuses, flags=()):
    return [{"status": status, "flags": list(flags)} for status in statuses]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok", "ok"], ExitCode.OK),
        (["ok", "skipped_unsupported"], ExitCode.OK),
        (["skipped_unsupported"], ExitCode.ENVIRONMENT),
        (["ok", "error"], ExitCode.PARTIAL),
        (["ok", "oom"], ExitCode.PARTIAL),
        (["oom"], ExitCode.NO_CELL),
        (["error", "skipped_unsupported"], ExitCode.NO_CELL),
        (["ok", "wrong_result", "error"], ExitCode.WRONG_RESULT),
        (["wrong_result"], ExitCode.WRONG_RESULT),
    ],
)
def test_exit_codes(statuses, code):
    assert exit_code(cells(*statuses)) == code
    assert exit_code(cells(*statuses), cancelled=True) == ExitCode.CANCELLED


def test_strict_fails_a_noisy_row():
    assert exit_code(cells("ok", flags="N"), strict_flags=True) == ExitCode.STRICT
    assert exit_code(cells("ok", flags="P"), strict_flags=True) == ExitCode.OK


def new_run(folder):
    return Run.create(folder, header(["bench", "kernel"], {"a": 1}, {}, {"version": "0"}))


def test_a_run_survives_a_line_cut_short(tmp_path):
    run = new_run(tmp_path / "r")
    for i in range(3):
        run.add({"cell_id": str(i), "status": "ok"})
    file = tmp_path / "r" / "cells.jsonl"
    file.write_text(file.read_text() + '{"cell_id": "3", "sta')
    again = Run.load(tmp_path / "r")
    assert [cell["cell_id"] for cell in again.cells] == ["0", "1", "2"]
    again.add({"cell_id": "3", "status": "ok"})
    assert [cell["cell_id"] for cell in Run.load(tmp_path / "r").cells] == ["0", "1", "2", "3"]


def test_run_file_holds_everything(tmp_path):
    run = new_run(tmp_path / "r")
    run.add({"cell_id": "1", "status": "ok"})
    run.save("cancelled", ExitCode.CANCELLED, [{"cell_id": "2", "status": "cancelled"}])
    document = json.loads((tmp_path / "r" / "run.json").read_text())
    assert document["exit_code"] == 130
    assert [cell["status"] for cell in document["cells"]] == ["ok", "cancelled"]
    assert document["repro_command"] == "moira bench kernel"
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["cells.jsonl", "run.json"]


def test_an_existing_run_is_not_overwritten(tmp_path):
    new_run(tmp_path / "r")
    with pytest.raises(CliError, match="already holds a run"):
        new_run(tmp_path / "r")


@pytest.mark.parametrize(
    "make", [lambda p: None, lambda p: (p / "run.json").write_text("{"), lambda p: (p / "x").touch()]
)
def test_folders_that_hold_no_run(tmp_path, make):
    make(tmp_path)
    with pytest.raises(CliError, match=str(tmp_path)):
        Run.load(tmp_path)


def test_unwritable_places_are_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CliError, match="cannot be written"):
        require_writable(tmp_path / "file" / "out.json", "--output-json")
    with pytest.raises(CliError, match="cannot be written"):
        new_run(tmp_path / "file" / "run")
    require_writable(tmp_path / "new" / "out.json", "--output-json")
    assert not (tmp_path / "new" / "out.json").exists()


def test_json_is_strict():
    assert dumps({"a": [float("nan"), 1.5, float("inf")], "b": float("-inf")}) == '{"a": [null, 1.5, null], "b": null}'


def test_cell_ids_depend_on_every_value():
    ids = {cell_id({"arm": arm, "point": {"seed": seed}}) for arm in "ab" for seed in (0, 1)}
    assert len(ids) == 4


def test_secrets_are_redacted():
    assert redact(["--token=abc", "API_KEY=xyz", "--seed", "1"]) == ["--token=***", "API_KEY=***", "--seed", "1"]
