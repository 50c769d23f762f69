"""Places a comparison's servers on one host's cores, the same ones for every architecture.

Plain and fused decoding use all cores. A distributed pair divides them: the draft has its own, the target the widest
degree on the rest. Neuron degrees fit by the plan (plan.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tandem.host.cores import format_cores
from tandem.host.devices import Devices
from tandem.host.instances import FAMILIES
from tandem.workshops.planning.plan import Pair, PlanConfig, pair_of, processes_of

Cores = tuple[int, ...]


def one_length(backend: str, device: str) -> bool:
    """Whether every round takes as long as the longest: Neuron graphs have one draft length."""
    return backend == "nxdi" or device == "neuron"


def pair_for(backend: str, temperatures: Collection[float]) -> str | None:
    """The --pair that answers these temperatures in the least memory."""
    if backend != "nxdi":
        return None
    sampled = [temperature > 0 for temperature in temperatures]
    return "fused" if not any(sampled) else "apart" if all(sampled) else "both"


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """A server's cores, such as "0-3", and its model's number of ranks."""

    cores: str
    degree: int = 1


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """`whole`: cores of plain and fused decoding; `target`, `draft`: apart (None: lookup, or drafts on the host)."""

    whole: CoreGroup
    target: CoreGroup
    draft: CoreGroup | None

    def __str__(self) -> str:
        whole = f"plain and fused decoding on cores {self.whole.cores} (degree {self.whole.degree})"
        if self.draft is None:
            return f"{whole}, and the target too where its draft is apart, on the host's CPU"
        return (
            f"{whole}; apart, the target on {self.target.cores} (degree {self.target.degree}) and the draft on"
            f" {self.draft.cores} (degree {self.draft.degree})"
        )


def place_on_cpus(cores: Cores, draft: Cores | None, degree: int) -> HostPlacement:
    """A target uses all its CPUs, as ranks (of `degree` or a divisor) or threads. Raises ValueError."""
    apart, rest = _divided(cores, draft, 1)
    if len(cores) % degree:
        raise ValueError(f"cores: {len(cores)} of them cannot be divided among {degree} ranks")
    narrower = max(d for d in range(1, degree + 1) if degree % d == 0 and len(rest) % d == 0)
    return HostPlacement(_group(cores, degree), _group(rest, narrower), _group(apart, 1))


def place_on_gpus(cores: Cores, draft: Cores | None, degree: int) -> HostPlacement:
    """Places servers on GPUs, one a process. Raises ValueError."""
    if degree != len(cores):
        raise ValueError(f"cores: tp_degree {degree} uses as many, and {len(cores)} are named")
    apart, rest = _divided(cores, draft, 1)
    narrower = max(d for d in range(1, degree + 1) if degree % d == 0 and d <= len(rest))
    return HostPlacement(_group(cores, degree), _group(rest[:narrower], narrower), _group(apart[:1], 1))


def place_on_neuron(
    config: PlanConfig, devices: Devices, cores: Cores | None, draft: Cores | None, apart: bool = True
) -> HostPlacement:
    """Places servers on this host's Neuron cores. Raises ValueError if they do not fit.

    `config`: for the found devices instead of its instance. `cores`: None takes the fewest. `apart`: the draft has its
    own cores.
    """
    if devices.family is None or not devices.count:
        raise ValueError("device: no Neuron device is found here; compare servers that run elsewhere with --connect")
    name = devices.instance or f"{devices.family}:{devices.count}"
    instance = replace(FAMILIES[devices.family], name=name, chips=devices.count)
    pair = pair_of(replace(config, lnc=devices.lnc), instance)
    if cores is not None and len(cores) > pair.cores:
        raise ValueError(f"cores: {len(cores)} are more than the {pair.cores} that a {name} has at LNC {pair.lnc}")
    apart = apart and pair.draft is not None
    sizes = [len(cores)] if cores else [size for size in pair.instance.degrees if size <= pair.cores]
    for size in sizes:
        whole = _widest(pair, "target" if pair.draft is None else "fused", size, config.degree)
        beside = _beside(pair, size, draft, config.degree) if apart else None
        if whole and (beside or not apart):
            break
    else:
        missing = "distributed" if whole else "fused" if pair.draft else "autoregressive"
        raise ValueError(f"cores: {missing} does not fit on {sizes[-1]} cores; --role plan says what does")
    every = cores or tuple(range(size))
    group = _group(every[:whole], whole)
    if beside is None:
        return HostPlacement(group, group, None)
    own, rest = _divided(every, draft, beside[1])
    return HostPlacement(group, _group(rest[: beside[0]], beside[0]), _group(own[: beside[1]], beside[1]))


def _widest(pair: Pair, kind: str, cores: int, degree: int | None = None) -> int:
    """The widest degree that fits, at most (fused: just) `degree`; 0 if none."""
    fitting = [each.degree for each in processes_of(pair, kind, cores) if each.fits]
    if degree is not None:
        fitting = [each for each in fitting if each == degree or (kind == "target" and each < degree)]
    return max(fitting, default=0)


def _beside(pair: Pair, cores: int, draft: Cores | None, degree: int | None) -> tuple[int, int] | None:
    """Degrees of the widest target and the narrowest draft, or the widest on the `draft` cores; None if none fit."""
    if draft is not None:
        both = _widest(pair, "target", cores - len(draft), degree), _widest(pair, "draft", len(draft))
        return both if all(both) else None
    target = _widest(pair, "target", cores - 1, degree)
    fitting = [each.degree for each in processes_of(pair, "draft", cores - target) if each.fits]
    return (target, min(fitting)) if target and fitting else None


def _divided(cores: Cores, draft: Cores | None, narrowest: int) -> tuple[Cores, Cores]:
    """The draft's cores, by default the last, and the rest. Raises ValueError."""
    if draft is None:
        draft = cores[len(cores) - narrowest :]
    if not set(draft) <= set(cores):
        raise ValueError(
            f"draft-cores: {format_cores(draft)} must be among --cores {format_cores(cores)}, or fused decoding"
            " would have fewer cores than a pair apart"
        )
    rest = tuple(core for core in cores if core not in draft)
    if not rest:
        raise ValueError("cores: a target and a draft apart need at least two")
    return draft, rest


def _group(cores: Cores, degree: int) -> CoreGroup:
    return CoreGroup(format_cores(cores), degree)
