"""Places a comparison's servers on this host by `tandem compare`'s flags."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from tandem.cli.compare_flags import COMPARE_FLAGS, CompareOptions
from tandem.cli.values import auto_or_count
from tandem.comparison.measuring.architectures import COMPARED
from tandem.comparison.measuring.config import ONE_LENGTH
from tandem.host.cores import parse_cores
from tandem.host.devices import find_devices
from tandem.workshops.planning.host_placement import HostPlacement, place_on_cpus, place_on_gpus, place_on_neuron
from tandem.workshops.planning.plan import PlanConfig

SPLIT = {architecture.name for architecture in COMPARED.values() if architecture.split}


def refuse_flags_of_other_backends(options: CompareOptions) -> None:
    """Raises ValueError for a flag of another backend."""
    for name, row in COMPARE_FLAGS.items():
        if name in options.given and options.backend not in row.backends:
            flag = name.replace("_", "-")
            verb = "do" if len(row.backends) > 1 else "does"
            raise ValueError(
                f"{flag}: --backend {options.backend} does not take it; {' and '.join(row.backends)} {verb}"
            )


def placement_of(options: CompareOptions, started: Collection[str]) -> HostPlacement | None:
    """The cores of the servers of `started`; None: the system's choice. Raises ValueError.

    Neuron cores are always placed, because a process takes all cores unless some are named.
    """
    if not started:
        return None
    if options.draft_device and options.draft_cores:
        raise ValueError("draft-cores: --draft-device cpu leaves the draft no cores of the device")
    cores = parse_cores(options.cores) if options.cores else None
    draft = parse_cores(options.draft_cores, "draft-cores") if options.draft_cores else None
    degree = options.tp_degree
    apart = bool(set(started) & SPLIT) and options.draft_device is None
    if options.backend == "nxdi" or options.device == "neuron":
        return place_on_neuron(_plan_of(options), find_devices(Path("/"), os.environ), cores, draft, apart)
    if cores is None:
        if draft is not None:
            raise ValueError("draft-cores: give --cores as well, which these are some of")
        return None
    if options.device == "cpu":
        return place_on_cpus(cores, draft, degree)
    if options.device == "cuda":
        return place_on_gpus(cores, draft, degree)
    raise ValueError("cores: name the --device whose cores these are")


def _plan_of(options: CompareOptions) -> PlanConfig:
    if options.model is None:
        raise ValueError("model: give --model DIR, whose config.json tells how it can be divided among cores")
    length = auto_or_count("speculation-length", options.speculation_length)
    return PlanConfig(
        instance="found",
        target_model=options.model,
        draft_model=None if options.draft == "ngram" else options.draft_model,
        backend=options.backend,
        dtype=options.dtype,
        batch=4 if options.batch is None else options.batch,
        length=options.sequence_length,
        drafts=ONE_LENGTH if length is None else length or 5,
        degree=options.tp_degree if options.tp_degree > 1 else None,
    )
