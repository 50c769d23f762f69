"""`--role plan`: the degrees at which target, draft and both fused fit on an instance, from config.json."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tandem.host.instances import Instance, instance_named
from tandem.workshops.planning.memory import (
    ASSUMPTIONS,
    Core,
    Load,
    Part,
    Route,
    Weights,
    core_of,
    degrees,
    weight_bytes,
)
from tandem.workshops.planning.shapes import DecoderShape, EightBit, read_draft_shape, read_shape

BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
QUANTIZATIONS = ("auto", "none", "int8", "f8e4m3", "f8e5m2")
SYSTEM_BYTES = 100 * 10**9
"""Disk for image, packages and compiled graphs. Assumed."""
LEAST_VOLUME = 512 * 10**9
"""AWS's least root volume of such an instance (its page on updating a DLAMI, SDK 2.33)."""


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """`drafts`: draft tokens a round; `chunk`: prompt tokens a step; `degree`: None for all.

    `quantization`: the target's; auto: its checkpoint's. `keep`: parts of the names of unquantized modules.
    """

    instance: str
    target_model: str
    draft_model: str | None = None
    backend: str = "torch"
    dtype: str = "auto"
    quantization: str = "auto"
    keep: tuple[str, ...] = ("lm_head",)
    batch: int = 4
    length: int = 512
    drafts: int = 5
    chunk: int = 64
    degree: int | None = None
    lnc: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in ("torch", "nxdi"):
            raise ValueError(f"backend: {self.backend!r} cannot be planned for; use torch or nxdi")
        if self.dtype not in BYTES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(BYTES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization: {self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        sizes = {"batch": self.batch, "sequence_length": self.length, "speculation_length": self.drafts}
        for name, value in {**sizes, "prefill_chunk": self.chunk}.items():
            if value < 1:
                raise ValueError(f"{name}: {value} is below 1")


@dataclass(frozen=True, slots=True)
class Pair:
    """Models, their stored weights, and the instance."""

    instance: Instance
    lnc: int
    route: Route
    load: Load
    target: DecoderShape
    target_weights: Weights
    draft: DecoderShape | None = None
    draft_weights: Weights | None = None

    @property
    def cores(self) -> int:
        return self.instance.cores(self.lnc)


@dataclass(frozen=True, slots=True)
class Process:
    """`kind`: target, draft or fused. `core`: None if the degree is `refused`."""

    kind: str
    degree: int
    core: Core | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.core is not None and self.core.fits


@dataclass(frozen=True, slots=True)
class Plan:
    """Each process at each degree. `disk`: bytes by use."""

    pair: Pair
    processes: tuple[Process, ...]
    disk: dict[str, int]
    remarks: tuple[str, ...]


def make_plan(config: PlanConfig) -> Plan:
    """Raises ValueError for an unknown instance, a missing key, or an impossible degree or length."""
    pair = pair_of(config, instance_named(config.instance))
    kinds = ("target",) if pair.draft is None else ("target", "fused") if pair.draft.features else _ALL
    found = tuple(
        process
        for kind in kinds
        for process in processes_of(pair, kind, pair.cores)
        if config.degree in (None, process.degree) or kind == "draft"
    )
    if not found:
        known = ", ".join(map(str, degrees(pair.target, pair.instance.chip, pair.cores, pair.route)))
        raise ValueError(f"tp_degree: {config.degree} is not one of {known} on a {pair.instance.name}")
    return Plan(pair, found, _disk(pair, found), tuple(_remarks(pair)))


_ALL = ("target", "draft", "fused")


def pair_of(config: PlanConfig, instance: Instance) -> Pair:
    """Reads both configurations. Raises ValueError."""
    target = read_shape(config.target_model, "target_model")
    draft = read_draft_shape(config.draft_model, target) if config.draft_model else None
    native = config.backend == "torch" and instance.chip.torchneuron
    route = Route.TORCHNEURON if native else Route.NXDI
    if draft is not None and draft.features and route is Route.NXDI:
        raise ValueError("draft_model: an EAGLE-3 head; a plan counts it for TorchNeuron alone, not for NxD Inference")
    for shape in (target, draft):
        if shape is not None and config.length > shape.longest:
            raise ValueError(
                f"sequence_length: {config.length} is above {shape.name}'s max_position_embeddings {shape.longest}"
            )
    each = BYTES[config.dtype]
    return Pair(
        instance=instance,
        lnc=instance.lnc(config.lnc),
        route=route,
        load=Load(config.batch, config.length, config.drafts, min(config.chunk, config.length)),
        target=target,
        target_weights=Weights(each, _eight_bit(config, target, route)),
        draft=draft,
        draft_weights=Weights(each, draft.eight_bit if draft and route is Route.NXDI else None),
    )


def _eight_bit(config: PlanConfig, target: DecoderShape, route: Route) -> EightBit | None:
    method = config.quantization
    if route is Route.TORCHNEURON:
        if method not in ("auto", "none"):
            raise ValueError(f"quantization: {method} is NxD Inference's; add --backend nxdi")
        return None
    if method == "auto":
        return target.eight_bit
    return None if method == "none" else EightBit(method, config.keep)


def processes_of(pair: Pair, kind: str, cores: int) -> list[Process]:
    """A process at each of the runtime's degrees on `cores`, ascending."""
    shape = pair.draft if kind == "draft" else pair.target
    assert shape is not None
    alone = "processes that share a target serve no EAGLE head"
    headed = kind == "fused" and pair.draft is not None and pair.draft.features
    found = degrees(shape, pair.instance.chip, cores, pair.route)
    whys = {degree: alone if headed and degree > 1 else why for degree, why in found.items()}
    return [Process(kind, degree, None if why else _core(pair, kind, degree), why) for degree, why in whys.items()]


def _core(pair: Pair, kind: str, degree: int) -> Core:
    # NxD Inference divides a fused draft like the target; Tandem's steps repeat it on every core.
    parts = [] if kind == "draft" else [Part(pair.target, degree, pair.target_weights)]
    if kind != "target":
        assert pair.draft is not None and pair.draft_weights is not None
        whole = kind == "fused" and pair.route is Route.TORCHNEURON
        parts.append(Part(pair.draft, 1 if whole else degree, pair.draft_weights))
    return core_of(parts, pair.load, pair.route, pair.instance.core_bytes(pair.lnc))


def _disk(pair: Pair, processes: tuple[Process, ...]) -> dict[str, int]:
    # NxD Inference writes a converted copy of FP8 checkpoints, and each core's share of every process.

    def stored(shape: DecoderShape | None, weights: Weights | None) -> int:
        return weight_bytes(shape, 1, Route.TORCHNEURON, weights) if shape and weights else 0

    source = Weights(pair.target_weights.bytes_each, pair.target.eight_bit)
    found = {"checkpoints": stored(pair.target, source) + stored(pair.draft, pair.draft_weights)}
    if pair.route is Route.NXDI:
        if pair.target_weights.eight_bit:
            found["a converted copy"] = stored(pair.target, pair.target_weights)
        fitting = {process.kind: process for process in reversed(processes) if process.fits}
        found["the cores' shares"] = sum(p.core.weights * p.degree for p in fitting.values() if p.core)
    return found | {"system and graphs (assumed)": SYSTEM_BYTES}


def _remarks(pair: Pair) -> Iterator[str]:
    chip, draft = pair.instance.chip, pair.draft
    if pair.route is Route.NXDI and not chip.torchneuron:
        yield f"{chip.family} runs NxD Inference of SDK 2.28.1; TorchNeuron does not run there."
    elif pair.route is Route.NXDI:
        yield "NxD Inference is in maintenance and loses Trn2 and Trn3 at SDK 2.34."
    elif pair.target.kv_heads < pair.cores:
        yield (
            f"TorchNeuron's degrees end at {pair.target.kv_heads} KV heads; NxD Inference repeats KV heads and goes"
            " further (--backend nxdi)."
        )
    if pair.route is Route.TORCHNEURON and pair.target.eight_bit:
        yield f"The checkpoint is {pair.target.eight_bit.method}; this route does not keep it in eight bits."
    if pair.route is Route.NXDI and draft:
        k = pair.load.drafts
        yield f"Speculation length {k} is {k + 1} in NxD Inference's count, which includes the committed token."
        yield "Sampled requests need the pair apart as well (--pair both): twice the memory of fused."
    if draft and draft.vocabulary != pair.target.vocabulary:
        yield f"Vocabularies differ ({pair.target.vocabulary} and {draft.vocabulary}): servers refuse such a pair."
    if chip.family == "trn3":
        yield "Trn3: cores and memory per core are divisions of AWS's figures per chip, degrees are taken from Trn2."


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan as a page's lines."""
    pair, load = plan.pair, plan.pair.load
    capacity = pair.instance.core_bytes(pair.lnc)
    yield (
        f"Plan for {pair.instance.name}: {pair.cores} cores at LNC {pair.lnc}, {capacity / 2**30:.0f} GiB each;"
        f" {pair.route.value}"
    )
    for role, shape in (("target", pair.target), ("draft", pair.draft)):
        if shape is not None:
            yield (
                f"  {role:7} {shape.name}: {shape.parameters / 1e9:.2f} billion parameters, {shape.layers} layers,"
                f" {shape.heads} heads, {shape.kv_heads} KV heads"
            )
    yield f"  load    batch {load.batch}, {load.length} tokens each, {load.drafts} draft tokens a round"
    yield ""
    usable = Core(0, 0, 0, capacity).usable
    yield f"GB (10^9 bytes) on each core, of {usable / 1e9:.2f} usable:"
    yield "  process  degree  weights      KV  buffers     sum"
    yield from map(_process_line, plan.processes)
    yield ""
    parts = ", ".join(f"{count / 1e9:,.0f} of {name}" for name, count in plan.disk.items())
    disk = max(sum(plan.disk.values()), LEAST_VOLUME)
    least = "; AWS asks for no less" if disk == LEAST_VOLUME else ""
    for line in (f"Disk: {disk / 1e9:,.0f} GB: {parts}{least}.", *plan.remarks, *ASSUMPTIONS):
        yield from textwrap.wrap(line, 110, subsequent_indent="  ")


def _process_line(process: Process) -> str:
    core = process.core
    if core is None:
        return f"  {process.kind:7}  {process.degree:>6}  no: {process.refused}"
    figures = [f"{count / 1e9:>7.2f}" for count in (core.weights, core.kv, core.buffers, core.total)]
    word = "fits" if core.fits else "too much"
    return f"  {process.kind:7}  {process.degree:>6}  {figures[0]} {figures[1]}  {figures[2]} {figures[3]}  {word}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; bytes on one core."""
    pair = plan.pair
    return {
        "kind": "plan, not a measurement",
        "assumptions": ASSUMPTIONS,
        "route": pair.route.value,
        "instance": {"name": pair.instance.name, "lnc": pair.lnc, "cores": pair.cores},
        "load": asdict(pair.load),
        "models": {s.name: s.parameters for s in (pair.target, pair.draft) if s},
        "processes": [
            asdict(p) | ({"total": p.core.total, "usable": p.core.usable} if p.core else {}) | {"fits": p.fits}
            for p in plan.processes
        ],
        "disk": plan.disk,
        "remarks": plan.remarks,
    }


def run_plan(config: PlanConfig, as_json: bool = False) -> int:
    """Prints the plan; returns the exit code."""
    plan = make_plan(config)
    print(json.dumps(plan_json(plan), indent=2) if as_json else "\n".join(plan_lines(plan)))
    return 0
