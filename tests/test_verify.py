import json

import pytest
from typer.testing import CliRunner

from moira_cli import verify
from moira_cli.main import app


def test_every_check_passes_here(has_gpu):
    result = CliRunner().invoke(app, ["verify", "--json"])
    assert result.exit_code == 0, result.output
    checks = json.loads(result.stdout)["checks"]
    assert len(checks) == 13
    not_run = [c["name"] for c in checks if c["ok"] is None]
    if has_gpu:
        assert set(not_run) <= {"gamma 1 against dense FA3"}
    else:
        assert not_run == ["gamma 1 against dense FA3", "CUDA-graph replay of other batches against eager"]
    real = next(c for c in checks if "real masses" in c["name"])
    assert real["measured"] == "256/256 rows equal"


@pytest.mark.parametrize("flag", [True, False])
def test_a_wrong_kernel_sets_the_exit_code(monkeypatch, flag):
    checks = [verify.Check("planted", "1", "0", flag), verify.Check("not run", "-", "-", None)]
    monkeypatch.setattr(verify, "Verification", lambda device: type("V", (), {"run": lambda self: iter(checks)})())
    result = CliRunner().invoke(app, ["verify"])
    assert result.exit_code == (0 if flag else 6)
    assert ("WRONG" in result.stdout) != flag
