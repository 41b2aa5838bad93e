"""`moira report` on a real run of this machine, and pictures from runs with what a GPU adds."""

import csv
import io
import json

import pytest

from moira_cli import plots
from moira_cli.report import COLUMNS
from moira_kernels import partition
from tests.test_cli import bench, moira, one_line, read_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    result = bench("--shape", "2kx1,2kx2", "--cv", "0,1", "--arms", "sparse-torch,moira", "--run-dir", folder)
    assert result.exit_code == 0, result.output
    return folder


def test_csv_has_a_row_per_cell_and_every_column(run_folder):
    rows = list(csv.DictReader(io.StringIO(moira("report", run_folder, "--format", "csv").stdout)))
    cells = read_run(run_folder)["cells"]
    assert len(rows) == len(cells) == 8
    assert list(rows[0]) == list(COLUMNS)
    for row, cell in zip(rows, cells, strict=True):
        assert row["arm"] == cell["arm"]
        if cell["status"] == "ok":
            assert float(row["time_us"]) == cell["timing"]["cpu_us"]["median"]
            assert float(row["total_us"]) == pytest.approx(float(row["time_us"]) + float(row["plan_us"]))
        else:
            assert row["time_us"] == ""
            assert "needs a CUDA GPU" in row["reason"]


def test_markdown_names_machine_and_command(run_folder):
    text = moira("report", run_folder).stdout
    assert text.startswith("cpu (")
    assert "    moira bench kernel" in text or "    moira" in text
    points, cells = text.split("| shape |")[1:]
    assert points.count("\n| ") == 4 + 1
    assert cells.count("\n| ") == 8 + 1
    assert "| 2kx1 | 2 | CV 1 (" in points
    assert "| skipped_unsupported |" in points


def test_json_is_the_run(run_folder, tmp_path):
    assert moira("report", run_folder, "--format", "json", "--output", tmp_path / "r.json").exit_code == 0
    assert json.loads((tmp_path / "r.json").read_text()) == read_run(run_folder)


def test_pictures_and_page(run_folder, tmp_path):
    result = moira("report", run_folder / "run.json", "--format", "png", "--output", tmp_path / "p.png")
    assert result.exit_code == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["p-cv.png", "p-rows.png"]
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in names)
    page = moira("report", run_folder, "--format", "html").stdout
    assert page.count("<img ") == 2
    assert page.count("<tr>") == 4 + 1 + 8 + 1
    assert "http" not in page


def test_work_per_thread_block_is_drawn_where_the_kernel_decides_it(run_folder):
    document = read_run(run_folder)
    for cell in document["cells"]:
        if cell["status"] == "ok":
            cell["work"]["thread_blocks"] = partition.eq4([30, 5, 100]).report()
    assert set(plots.figures(document)) == {"cv", "rows", "blocks"}


def test_nothing_to_draw_and_no_file_to_draw_into(run_folder, tmp_path):
    assert bench("--shape", "512x1", "--arms", "sparse-torch", "--run-dir", tmp_path / "one").exit_code == 0
    one_line(moira("report", tmp_path / "one", "--format", "png", "--output", tmp_path / "p.png"), 2, "nothing to draw")
    one_line(moira("report", run_folder, "--format", "png"), 2, "--output NAME.png")
    one_line(moira("report", tmp_path), 2, "cannot be read")
    assert moira("report", tmp_path / "one", "--format", "html").stdout.count("<img ") == 0
    assert not list(tmp_path.glob("*.png"))


def test_missing_matplotlib_says_what_to_install(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = moira("report", run_folder, "--format", "png", "--output", tmp_path / "p.png")
    one_line(result, 3, "pip install 'moira-attention[plots]'")
