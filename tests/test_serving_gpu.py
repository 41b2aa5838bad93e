"""`moira bench e2e` on a GPU: a tiny model with dummy weights in real engines with full CUDA graphs."""

from pathlib import Path

import pytest

from tests import engines
from tests.test_cli import moira, read_run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

from moira_cli import models  # noqa: E402


def test_both_arms_decode_in_full_graphs_and_count_pages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setitem(models.PRESETS, "tiny", engines.TINY_LLAMA)
    options = {"--tokens": 40, "--repetitions": 2, "--launches": 1, "--reads": 0.4, "--gpu-memory-utilization": 0.3}
    arguments = [part for option in options.items() for part in option]
    result = moira("bench", "e2e", "--model", "tiny", "--arms", "dense-fa3,moira", "--shape", "1kx1,1kx2,1500x4",
                   "--run-dir", "r", "--allow-busy", *arguments)  # fmt: skip
    assert result.exit_code == 0, result.output
    cells = read_run(Path("r"))["cells"]
    assert len(cells) == 6
    for cell in cells:
        assert cell["decode_steps"] == cell["full_graph_steps"] == 2 * 39
        assert cell["engine_detail"]["backends"] == ["CUSTOM" if cell["arm"] == "moira" else "FLASH_ATTN"]
        assert cell["engine_detail"]["fa_version"] == 3
        if cell["arm"] == "moira":
            assert abs(cell["page_read_fraction"] - 0.4) < 0.03
