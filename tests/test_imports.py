"""Imports go downwards only, and optional libraries stay in the files that wrap them (docs/README of the layout)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    path.relative_to(ROOT) for top in ("moira_kernels", "baselines", "moira_cli") for path in (ROOT / top).rglob("*.py")
]
ALLOWED = {
    "moira_kernels": {"moira_kernels"},
    "baselines": {"baselines", "moira_kernels"},
    "moira_cli": {"moira_cli", "baselines", "moira_kernels"},
}
ONLY_IN = {
    "vllm": ("moira_kernels/vllm_plugin", "baselines/", "moira_cli/serving_child.py"),
    "flash_attn_3": ("baselines/",),
    "flashinfer": ("baselines/",),
    "typer": ("moira_cli/",),
    "rich": ("moira_cli/",),
    "transformers": ("moira_cli/",),
    "nvtx": ("moira_kernels/ranges.py",),
}


def imported(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_layers(path):
    for name in imported(path):
        if name in ALLOWED:
            assert name in ALLOWED[path.parts[0]], f"{path} imports {name}"
        if name in ONLY_IN:
            assert str(path).startswith(ONLY_IN[name]), f"{path} imports {name}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["bench", "kernel", "--help"],
        ["bench", "e2e", "--help"],
        ["profile", "--help"],
        ["list", "arms"],
        ["list", "e2e"],
        ["list", "shapes"],
    ],
)
def test_commands_without_torch_import_no_torch(arguments):
    code = (
        "import sys; from moira_cli.main import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'triton', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
