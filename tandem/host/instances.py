"""AWS instances with Neuron chips.

Sources: AWS Neuron documentation, pages trn1-arch, inf2-arch, trn2-arch, trn3-arch, logical-neuroncore-config, and the
NxD Inference features guide for tensor-parallel degrees. AWS lists no sizes of Trn3: `FAMILY:CHIPS` names any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Instance:
    """Chips of one kind; `physical_cores` and `memory_bytes` are of one.

    `lnc`: logical core configurations, the default first. `degrees`: tensor-parallel degrees of the runtime.
    """

    name: str
    physical_cores: int
    memory_bytes: int
    lnc: tuple[int, ...]
    degrees: tuple[int, ...]
    torchneuron: bool
    chips: int = 1

    def checked_lnc(self, requested: int | None) -> int:
        """Physical cores per logical core; None: the default. Raises ValueError if the chip lacks it."""
        if requested is not None and requested not in self.lnc:
            raise ValueError(f"lnc: {requested} is not one of {', '.join(map(str, self.lnc))} on {self.name}")
        return requested or self.lnc[0]

    def cores(self, lnc: int) -> int:
        """Logical cores."""
        return self.chips * self.physical_cores // lnc

    def core_bytes(self, lnc: int) -> int:
        """Memory of one logical core: an equal share of its chip's. (With LNC 1, two cores share a bank.)"""
        return self.memory_bytes * lnc // self.physical_cores


_POWERS = (1, 2, 4, 8, 16, 32, 64)
FAMILIES = {
    "trn1": Instance("trn1", 2, 32 * GIB, (1,), (1, 2, 8, 16, 32), torchneuron=False),
    "inf2": Instance("inf2", 2, 32 * GIB, (1,), (1, 2, 4, 8, 24), torchneuron=False),
    "trn2": Instance("trn2", 8, 96 * GIB, (2, 1), _POWERS, torchneuron=True),
    "trn3": Instance("trn3", 8, 144 * GIB, (2, 1), _POWERS, torchneuron=True),
}
"""By family, of one chip."""
_CHIPS = {
    "trn1": {"trn1.2xlarge": 1, "trn1.32xlarge": 16, "trn1n.32xlarge": 16},
    "inf2": {"inf2.xlarge": 1, "inf2.8xlarge": 1, "inf2.24xlarge": 6, "inf2.48xlarge": 12},
    "trn2": {"trn2.3xlarge": 1, "trn2.48xlarge": 16, "trn2u.48xlarge": 16},
    "trn3": {"trn3-gen1": 16, "trn3-gen2": 4},
}
INSTANCES = {
    name: replace(FAMILIES[family], name=name, chips=chips)
    for family, sizes in _CHIPS.items()
    for name, chips in sizes.items()
}


def instance_named(name: str) -> Instance:
    """A known instance, or FAMILY:CHIPS such as trn3:4. Raises ValueError with the known ones."""
    known = INSTANCES.get(name)
    if known is not None:
        return known
    family, colon, chips = name.partition(":")
    if colon and family in FAMILIES and chips.isdecimal() and 0 < int(chips) <= 144:
        return replace(FAMILIES[family], name=name, chips=int(chips))
    raise ValueError(
        f"instance: {name!r} is not one of {', '.join(INSTANCES)},"
        f" nor FAMILY:CHIPS with a family of {', '.join(FAMILIES)} (as in trn3:4)"
    )


def family_of(name: str | None) -> str | None:
    """The family of an instance type: trn1 for trn1n.32xlarge, trn3 for trn3pd98.3xlarge; None if unknown."""
    return next((family for family in FAMILIES if name and name.lower().startswith(family)), None)
