"""Finds installed packages of other versions than the Neuron software beside them asks for, by metadata alone."""

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
"""Whose requirements are read; vllm-neuron may stand beside Tandem, which never calls it."""
BREAKING = frozenset({"torch", "transformers", *ASKING})
"""What these packages call, or are compiled against: another version of it is refused, of anything else only said."""
TANDEM = {"grpcio": ">=1.71.2,<1.84", "protobuf": ">=5.29,<8"}
TANDEM_ON_TORCHNEURON = {"transformers": ">=5.0,<6"}
"""Our own ranges (pyproject.toml). NxD Inference brings an older transformers; of that, Tandem uses only tokenizers."""


@dataclass(frozen=True, slots=True)
class Clash:
    """`name` is installed in version `found`, and `by` wants `wanted`. `refused`: starting would go wrong."""

    name: str
    found: str
    wanted: str
    by: str
    refused: bool

    def __str__(self) -> str:
        return f"{self.name} {self.found} is installed, and {self.by} needs {self.name}{self.wanted}"


def clashes(packages: Iterable[Package], path: Sequence[str] | None = None) -> tuple[Clash, ...]:
    """What clashes on `path` (default: sys.path) with these Neuron packages and with what Tandem needs."""
    asking = [package for package in packages if package.name in ASKING and not package.placeholder]
    installed = distributions(path)
    ours = TANDEM | (TANDEM_ON_TORCHNEURON if any(package.native for package in asking) else {})
    own = tuple(_own({name: installed[name].version for name in ours if name in installed}, ours))
    return own + tuple(_asked(asking, installed))


def own_clashes() -> tuple[Clash, ...]:
    """What clashes with Tandem's own ranges, whatever the device; reads no other package's metadata."""
    return tuple(_own({name: version for name in TANDEM if (version := installed_version(name))}, TANDEM))


def refusal(found: Iterable[Clash]) -> str | None:
    """The clashes with which a start would go wrong, in one line; None if there are none."""
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
    """The numbers that a version begins with; packaging, which knows more, may be absent."""
    return tuple(int(number) for number in re.match(r"[\d.]*", version)[0].split(".") if number)  # type: ignore[index]
