"""Which Neuron packages are installed, read from metadata and file lists: nothing is imported.

PyPI holds placeholders under the names of AWS's packages (torch-neuronx 1.0, neuronx-cc 1.0.post1, libneuronxla 1.0,
neuronx-distributed 0.1, neuronx-distributed-inference 0.1.0, nki 0.0.1, vllm-neuron 0.1.0, torch-neuron 1.0). They are
AWS's own: modules that raise ImportError, and a description that begins with "WRONG PACKAGE", by which they are known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata

NAMES = (
    "torch-neuronx",
    "torch-neuron",
    "torch-xla",
    "libneuronxla",
    "neuronx-cc",
    "nki",
    "neuronx-distributed",
    "neuronx-distributed-inference",
    "vllm-neuron",
)
MARK = "WRONG PACKAGE"
NATIVE_MODULE = "torch_neuronx/neuron_dynamo_backend"
LAST_XLA = (2, 9)


@dataclass(frozen=True, slots=True)
class Package:
    """`native`: a torch-neuronx that is TorchNeuron, not the XLA package of the same name."""

    name: str
    version: str
    placeholder: bool = False
    native: bool = False


def installed_packages(path: Sequence[str] | None = None) -> tuple[Package, ...]:
    """The Neuron packages on `path` (default: this interpreter's)."""
    found: dict[str, Package] = {}
    for distribution in metadata.distributions(path=list(sys.path if path is None else path)):
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in NAMES and name not in found:  # the first on the path is the one that is imported
            found[name] = _package(name, distribution)
    return tuple(found[name] for name in NAMES if name in found)


def _package(name: str, distribution: metadata.Distribution) -> Package:
    placeholder = MARK in (distribution.read_text("METADATA") or "")
    native = name == "torch-neuronx" and not placeholder and _native(distribution)
    return Package(name, distribution.version, placeholder, native)


def _native(distribution: metadata.Distribution) -> bool:
    """By TorchNeuron's own module; or by version, since the XLA line ended at 2.9."""
    files = distribution.files or ()
    return any(str(file).startswith(NATIVE_MODULE) for file in files) or release(distribution.version) > LAST_XLA


def release(version: str) -> tuple[int, int]:
    """Major and minor; (0, 0) for what is no version."""
    parts = version.split("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0


def version_of(packages: Iterable[Package], name: str) -> str | None:
    """Of the package that AWS ships under this name; None where it is absent or a placeholder."""
    return next((p.version for p in packages if p.name == name and not p.placeholder), None)
