"""Builds the placement of a comparison's servers on this host from `tandem compare`'s flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from pathlib import Path

from tandem.cli.values import auto_or_count
from tandem.comparison.measuring.architectures import COMPARED
from tandem.planning.cores import parse_cores
from tandem.planning.devices import find_devices
from tandem.planning.host_placement import HostPlacement, place_on_cpus, place_on_gpus, place_on_neuron
from tandem.planning.plan import PlanConfig

SPLIT = {architecture.name for architecture in COMPARED.values() if architecture.split}
TAKERS = {
    "device": ("torch",),
    "tp_degree": ("torch", "nxdi"),
    "cores": ("torch", "nxdi"),
    "draft_cores": ("torch", "nxdi"),
    "draft_device": ("torch", "nxdi"),
    "compiled_dir": ("torch", "nxdi"),
    "dtype": ("torch", "nxdi"),
    "threads": ("torch",),
    "weights": ("torch",),
    "neuron_config": ("nxdi",),
    "draft_neuron_config": ("nxdi",),
}
"""The backends whose servers take a flag; the others take all."""


def refuse_flags_of_other_backends(backend: str, given: Collection[str]) -> None:
    """Raises ValueError for a flag that the servers of this backend do not take."""
    for name, backends in TAKERS.items():
        if name in given and backend not in backends:
            flag = name.replace("_", "-")
            verb = "do" if len(backends) > 1 else "does"
            raise ValueError(f"{flag}: --backend {backend} does not take it; {' and '.join(backends)} {verb}")


def placement_of(arguments: argparse.Namespace, started: Collection[str]) -> HostPlacement | None:
    """Returns where servers run; None: wherever the system lets them. `started`: the architectures started here.

    Neuron cores are always placed, because a process takes all cores that nobody names. Raises ValueError.
    """
    if not started:
        return None
    if arguments.draft_device and arguments.draft_cores:
        raise ValueError("draft-cores: --draft-device cpu leaves the draft no cores of the device")
    cores = parse_cores(arguments.cores) if arguments.cores else None
    draft = parse_cores(arguments.draft_cores, "draft-cores") if arguments.draft_cores else None
    degree = arguments.tp_degree
    apart = bool(set(started) & SPLIT) and arguments.draft_device is None
    if arguments.backend == "nxdi" or arguments.device == "neuron":
        return place_on_neuron(_plan_of(arguments), find_devices(Path("/"), os.environ), cores, draft, apart)
    if cores is None:
        if draft is not None:
            raise ValueError("draft-cores: give --cores as well, which these are some of")
        return None
    if arguments.device == "cpu":
        return place_on_cpus(cores, draft, degree)
    if arguments.device == "cuda":
        return place_on_gpus(cores, draft, degree)
    raise ValueError("cores: name the --device whose cores these are")


def _plan_of(arguments: argparse.Namespace) -> PlanConfig:
    if arguments.model is None:
        raise ValueError("model: give --model DIR, whose config.json tells how it can be divided among cores")
    length = auto_or_count("speculation-length", arguments.speculation_length)
    return PlanConfig(
        instance="found",
        target_model=arguments.model,
        draft_model=None if arguments.draft == "ngram" else arguments.draft_model,
        backend=arguments.backend,
        dtype=arguments.dtype,
        batch=4 if arguments.batch is None else arguments.batch,
        length=arguments.sequence_length,
        drafts=length or 5,
        degree=arguments.tp_degree if arguments.tp_degree > 1 else None,
    )
