"""Finds installed packages whose versions the Neuron software does not support, by metadata alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from tandem.host.packages import Package, distributions, installed_version, plain_name

ASKING = (
    "torch-neuronx",
    "torch-xla",
    "libneuronxla",
    "neuronx-cc",
    "nki",
    "neuronx-distributed",
    "neuronx-distributed-inference",
)
"""Packages whose requirements are read. Not vllm-neuron: Tandem never calls it."""
BREAKING = frozenset({"torch", "transformers", *ASKING})
"""Neuron software calls these or is compiled against them, so other versions are refused; the rest is only reported."""
TANDEM = {"grpcio": ">=1.71.2,<1.84", "protobuf": ">=5.29,<8"}
TANDEM_ON_TORCHNEURON = {"transformers": ">=5.0,<6"}
"""As in pyproject.toml. NxD Inference has an older transformers; there Tandem uses tokenizers alone."""


@dataclass(frozen=True, slots=True)
class Clash:
    """`name` has version `found`; `by` requires `wanted`. `refused`: starting would fail."""

    name: str
    found: str
    wanted: str
    by: str
    refused: bool

    def __str__(self) -> str:
        return f"{self.name} {self.found} is installed, and {self.by} needs {self.name}{self.wanted}"


def clashes(packages: Iterable[Package], path: Sequence[str] | None = None) -> tuple[Clash, ...]:
    """The clashes on `path` (default: sys.path) with these Neuron packages and with Tandem."""
    asking = [package for package in packages if package.name in ASKING and not package.placeholder]
    installed = distributions(path)
    ours = TANDEM | (TANDEM_ON_TORCHNEURON if any(package.native for package in asking) else {})
    own = tuple(_own({name: installed[name].version for name in ours if name in installed}, ours))
    return own + tuple(_asked(asking, installed))


def own_clashes() -> tuple[Clash, ...]:
    """Clashes with Tandem's own ranges, for any device."""
    return tuple(_own({name: version for name in TANDEM if (version := installed_version(name))}, TANDEM))


def refusal(found: Iterable[Clash]) -> str | None:
    """The refused clashes in one line; None without any."""
    return "; ".join(str(clash) for clash in found if clash.refused) or None


def _asked(asking: Sequence[Package], installed: dict[str, metadata.Distribution]) -> Iterator[Clash]:
    if not asking:
        return
    from packaging.requirements import Requirement  # of transformers; where Neuron packages are, it is too

    for package in asking:
        for line in installed[package.name].requires or ():
            need = Requirement(line)
            name = plain_name(need.name)
            if name not in installed or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
                continue
            here = installed[name].version
            if not need.specifier.contains(here, prereleases=True):
                yield Clash(name, here, str(need.specifier), f"{package.name} {package.version}", name in BREAKING)


def _own(versions: dict[str, str], ranges: dict[str, str]) -> Iterator[Clash]:
    for name, wanted in ranges.items():
        least, below = (_numbers(bound) for bound in wanted.removeprefix(">=").split(",<"))
        if name in versions and not least <= _numbers(versions[name]) < below:
            yield Clash(name, versions[name], wanted, "Tandem", True)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version. `packaging` may be absent."""
    return tuple(int(number) for number in re.match(r"[\d.]*", version)[0].split(".") if number)  # type: ignore[index]
