"""Stand-ins for AWS's closed packages: wheels with their names and versions, and what they require that pip must obey.

They contain nothing that computes. torch is this project's own pin, since AWS's (2.9 and 2.14) have no build for a CPU
on PyPI; all else that they require is as AWS's metadata has it (../shared/neuron says where that was read).
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    requires: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


PACKAGES = {
    "torchneuron": (  # SDK 2.33.0
        Package("torch-neuronx", "2.14.3.0.1", (TORCH,)),
        Package("neuronx-cc", "2.28.7631.0"),
        Package("nki", "0.7.0"),
    ),
    "nxdi": (  # SDK 2.31.1
        Package("torch-neuronx", "2.9.0.2.15.32035", (TORCH,)),
        Package("libneuronxla", "2.2.1"),
        Package("neuronx-cc", "2.26.6360.0"),
        Package("nki", "0.5.0"),
        Package("neuronx-distributed", "0.19.28492", ("safetensors", "setuptools>=70.1")),
        Package(
            "neuronx-distributed-inference",
            "0.10.18399",
            ("transformers==4.57.*", "huggingface-hub", "sentencepiece", "neuronx-distributed", "torch-neuronx==2.9.*"),
        ),
    ),
}


def write(image: str, folder: Path) -> Path:
    """Writes the wheels of an image's AWS packages; returns the folder."""
    folder.mkdir()
    for package in PACKAGES[image]:
        _wheel(package, folder)
    return folder


def _wheel(package: Package, folder: Path) -> None:
    info = f"{package.module}-{package.version}.dist-info"
    requires = "".join(f"Requires-Dist: {line}\n" for line in package.requires)
    contents = {
        f"{package.module}/__init__.py": f'__version__ = "{package.version}"\n',
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tandem-tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(text)},{len(text)}\n" for name, text in contents.items())
    with zipfile.ZipFile(folder / f"{package.module}-{package.version}-py3-none-any.whl", "w") as wheel:
        for name, text in (contents | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            wheel.writestr(name, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
