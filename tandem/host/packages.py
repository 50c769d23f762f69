"""Finds installed Neuron packages by metadata, without importing them.

PyPI has AWS's placeholders (torch-neuronx 1.0, neuronx-cc 1.0.post1, libneuronxla 1.0, neuronx-distributed 0.1,
neuronx-distributed-inference 0.1.0, nki 0.0.1, vllm-neuron 0.1.0, torch-neuron 1.0): their modules raise ImportError,
and their descriptions begin with "WRONG PACKAGE".
"""

from __future__ import annotations

import re
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
    """`placeholder`: PyPI's. `native`: TorchNeuron, not the XLA package of the same name."""

    name: str
    version: str
    placeholder: bool = False
    native: bool = False


def installed_packages(path: Sequence[str] | None = None) -> tuple[Package, ...]:
    """The Neuron packages on `path` (default: sys.path), in the order of NAMES."""
    found = distributions(path)
    return tuple(_package(name, found[name]) for name in NAMES if name in found)


def distributions(path: Sequence[str] | None = None) -> dict[str, metadata.Distribution]:
    """Distributions on `path` (default: sys.path) by name; the first of a name is the one imported."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions(path=list(sys.path if path is None else path)):
        found.setdefault(plain_name(_name(distribution)), distribution)
    return found


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(distribution: metadata.Distribution) -> str:
    # `distribution.metadata` would parse the description too: 0.1 s for 400 packages.
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    found = re.search(r"^Name:[ \t]*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def installed_package(name: str, path: Sequence[str] | None = None) -> Package | None:
    """The Neuron package `name`; None if absent."""
    return next((package for package in installed_packages(path) if package.name == name), None)


def installed_version(name: str) -> str | None:
    """Any package's version; None if absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_placeholder(metadata_text: str) -> bool:
    """Whether this METADATA is a placeholder's."""
    return MARK in metadata_text


def _package(name: str, distribution: metadata.Distribution) -> Package:
    placeholder = is_placeholder(distribution.read_text("METADATA") or "")
    native = name == "torch-neuronx" and not placeholder and _native(distribution)
    return Package(name, distribution.version, placeholder, native)


def _native(distribution: metadata.Distribution) -> bool:
    """Whether it has TorchNeuron's module, or is newer than 2.9, the last XLA version."""
    files = distribution.files or ()
    return any(str(file).startswith(NATIVE_MODULE) for file in files) or release(distribution.version) > LAST_XLA


def release(version: str) -> tuple[int, int]:
    """Major and minor version; (0, 0) if unreadable."""
    parts = version.split("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0


def version_of(packages: Iterable[Package], name: str) -> str | None:
    """The version of AWS's package `name`; None if absent or a placeholder."""
    return next((p.version for p in packages if p.name == name and not p.placeholder), None)
