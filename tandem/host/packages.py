"""Finds installed Neuron packages, and versions that clash, by metadata, without importing them.

PyPI has AWS's placeholders (torch-neuronx 1.0, neuronx-cc 1.0.post1, libneuronxla 1.0, neuronx-distributed 0.1,
neuronx-distributed-inference 0.1.0, nki 0.0.1, vllm-neuron 0.1.0, torch-neuron 1.0): their modules raise ImportError,
and their descriptions begin with "WRONG PACKAGE".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
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
CALLED = frozenset({"torch", "transformers", *NAMES} - {"vllm-neuron", "torch-neuron"})
"""Neuron software calls these or is compiled against them, so other versions are refused."""
TANDEM = {"grpcio": ">=1.71.2,<1.84", "protobuf": ">=5.29,<8"}
TANDEM_ON_TORCHNEURON = {"transformers": ">=5.0,<6"}
"""As in pyproject.toml. NxD Inference has an older transformers; there Tandem uses tokenizers alone."""
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


def _package(name: str, distribution: metadata.Distribution) -> Package:
    placeholder = MARK in (distribution.read_text("METADATA") or "")
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


@dataclass(frozen=True, slots=True)
class Clash:
    """`name` has version `found`; `by` requires `wanted`."""

    name: str
    found: str
    wanted: str
    by: str

    def __str__(self) -> str:
        return f"{self.name} {self.found} is installed, and {self.by} needs {self.name}{self.wanted}"


def clashes(packages: Iterable[Package] = (), path: Sequence[str] | None = None) -> tuple[Clash, ...]:
    """The clashes on `path` (default: sys.path) with Tandem and with what these Neuron packages call."""
    asking = [package for package in packages if package.name in CALLED and not package.placeholder]
    ours = TANDEM | (TANDEM_ON_TORCHNEURON if any(package.native for package in asking) else {})
    if not asking and path is None:  # at each start: without reading all packages' metadata
        return tuple(_own({name: version for name in ours if (version := installed_version(name))}, ours))
    every = distributions(path)
    installed = {name: found.version for name, found in every.items()}
    return *_own(installed, ours), *_asked(asking, installed, every)


def refusal(found: Iterable[Clash]) -> str | None:
    """The clashes in one line; None without any."""
    return "; ".join(map(str, found)) or None


def _asked(
    asking: Sequence[Package], installed: dict[str, str], every: dict[str, metadata.Distribution]
) -> Iterator[Clash]:
    for package in asking:
        from packaging.requirements import Requirement  # of transformers; where Neuron packages are, it is too

        for need in map(Requirement, every[package.name].requires or ()):
            here = installed.get(name := plain_name(need.name))
            if name not in CALLED or here is None or not (need.marker is None or need.marker.evaluate({"extra": ""})):
                continue
            if not need.specifier.contains(here, prereleases=True):
                yield Clash(name, here, str(need.specifier), f"{package.name} {package.version}")


def _own(installed: dict[str, str], ranges: dict[str, str]) -> Iterator[Clash]:
    for name, wanted in ranges.items():
        least, below = (_numbers(bound) for bound in wanted.removeprefix(">=").split(",<"))
        if name in installed and not least <= _numbers(installed[name]) < below:
            yield Clash(name, installed[name], wanted, "Tandem")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version. `packaging` may be absent."""
    return tuple(int(number) for number in re.match(r"[\d.]*", version)[0].split(".") if number)  # type: ignore[index]
