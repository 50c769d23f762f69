"""Plans for `--role plan` what fits on an instance, from two config.json files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.host.instances import Instance, instance_named
from tandem.workshops.planning.graphs import bucket_list
from tandem.workshops.planning.head_shape import HeadShape, read_head_shape
from tandem.workshops.planning.memory import Load
from tandem.workshops.planning.placement import (
    Pair,
    Placement,
    Process,
    advice,
    compared,
    compile_budget,
    pair_remark,
    process_of,
)
from tandem.workshops.planning.shapes import Converted, DecoderShape, read_shape
from tandem.workshops.planning.sharding import Degree, Route, Weights, degrees
from tandem.workshops.planning.storage import Storage, storage_lines, storage_of

BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
CHUNK = 64  # tokens of a prompt per step
QUANTIZATIONS = ("auto", "none", "int8", "f8e4m3", "f8e5m2")


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """What to plan. `drafts`: Tandem's speculation length, draft tokens a round.

    `degree`, `cores`: None lets the plan choose. `compile_minutes`: what compiling a graph is assumed to take.
    `quantization`: the target's; auto is that of its checkpoint. `keep`: parts of names of modules that are not
    quantized.
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
    context_buckets: str | None = None
    decode_buckets: str | None = None
    row_buckets: tuple[int, ...] = ()
    draft_buckets: tuple[int, ...] = ()
    chunk: int | None = None
    degree: int | None = None
    cores: int | None = None
    lnc: int | None = None
    compile_minutes: float = 10.0

    def __post_init__(self) -> None:
        if self.backend not in ("torch", "nxdi"):
            raise ValueError(f"backend: {self.backend!r} cannot be planned for; use torch or nxdi")
        if self.dtype not in BYTES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(BYTES)}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization: {self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        for name, value in (
            ("batch", self.batch),
            ("sequence_length", self.length),
            ("speculation_length", self.drafts),
        ):
            if value < 1:
                raise ValueError(f"{name}: {value} is below 1")
        if not self.compile_minutes > 0:
            raise ValueError(f"compile_minutes: {self.compile_minutes} is not above 0")


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: every degree of the target with what a core would hold, and both placements."""

    pair: Pair
    degrees: tuple[tuple[Degree, Process | None], ...]
    draft_degrees: tuple[Degree, ...]
    placements: tuple[Placement, ...]
    storage: Storage
    remarks: tuple[str, ...]


def make_plan(config: PlanConfig, instance: Instance | None = None) -> Plan:
    """Makes a plan. Raises ValueError for an unknown instance, a missing key, or an impossible degree or length.

    `instance`: one that was found, instead of the one that `config` names.
    """
    instance = instance or instance_named(config.instance)
    lnc = instance.lnc(config.lnc)
    target = read_shape(config.target_model, "target_model")
    draft = _draft(config.draft_model, target) if config.draft_model else None
    route = route_for(config.backend, instance)
    if isinstance(draft, HeadShape) and route is Route.NXDI:
        raise ValueError("draft_model: an EAGLE-3 head; a plan counts it for TorchNeuron alone, not for NxD Inference")
    _check_lengths(config, target, draft)
    each = BYTES[config.dtype]
    pair = Pair(
        instance=instance,
        lnc=lnc,
        route=route,
        load=_load(config, route),
        target=target,
        target_weights=Weights(each, _eight_bit(config, target, route)),
        draft=draft,
        draft_weights=Weights(each, draft.converted if draft and route is Route.NXDI else None),
    )
    _check_cores(config, pair)
    found = degrees(target, instance.chip, instance.cores(lnc), route)
    rows = tuple((d, None if d.refused else process_of(pair, "target", d.degree)) for d in found)
    placements = compared(pair, config.cores, config.degree)
    budget = compile_budget(placements, config.compile_minutes)
    storage = storage_of(pair, placements)
    remarks = (*_remarks(config, pair), *pair_remark(pair, placements), *budget, *storage_lines(storage))
    remarks = (*remarks, *advice(pair, placements))
    apart = draft is not None and not pair.head
    draft_degrees = degrees(draft, instance.chip, instance.cores(lnc), route) if draft and apart else ()
    return Plan(pair, rows, draft_degrees, placements, storage, remarks)


def _draft(folder: str, target: DecoderShape) -> DecoderShape:
    return read_head_shape(folder, target) or read_shape(folder, "draft_model")


def route_for(backend: str, instance: Instance) -> Route:
    """TorchNeuron if the instance runs it, unless NxD Inference is requested."""
    return Route.TORCHNEURON if backend == "torch" and instance.chip.torchneuron else Route.NXDI


def _load(config: PlanConfig, route: Route) -> Load:
    length = config.length
    if route is Route.TORCHNEURON:
        for name, given in (("context_buckets", config.context_buckets), ("decode_buckets", config.decode_buckets)):
            if given is not None:
                raise ValueError(f"{name}: is NxD Inference's; Tandem's own steps prefill in chunks into one length")
        _check_buckets("batch_buckets", config.row_buckets, config.batch)
        _check_buckets("draft_buckets", config.draft_buckets, config.drafts)
        shapes = {"row_buckets": config.row_buckets, "draft_buckets": config.draft_buckets}
        chunk = CHUNK if config.chunk is None else config.chunk
        return Load(config.batch, length, config.drafts, **shapes, chunk=min(chunk, length))
    for name, told in (
        ("batch_buckets", config.row_buckets),
        ("draft_buckets", config.draft_buckets),
        ("prefill_chunk", config.chunk),
    ):
        if told:
            raise ValueError(f"{name}: is of Tandem's own steps, which do not run here; NxD Inference does")
    context = bucket_list("context_buckets", config.context_buckets, length)
    decode = bucket_list("decode_buckets", config.decode_buckets, length)
    if config.drafts + 1 in context:
        raise ValueError(
            f"context_buckets: {config.drafts + 1} equals a verification's width, which NxD Inference confuses"
        )
    if decode[-1] != length:
        raise ValueError(f"decode_buckets: the largest, {decode[-1]}, is below sequence_length {length}")
    return Load(config.batch, length, config.drafts, context, decode)


def _check_buckets(name: str, buckets: tuple[int, ...], most: int) -> None:
    for bucket in buckets:
        if not 1 <= bucket <= most:
            raise ValueError(f"{name}: {bucket} is outside 1 to {most}")


def _eight_bit(config: PlanConfig, target: DecoderShape, route: Route) -> Converted | None:
    asked = config.quantization
    if route is Route.TORCHNEURON:
        if asked not in ("auto", "none"):
            raise ValueError(f"quantization: {asked} is NxD Inference's; add --backend nxdi")
        return None
    if asked == "auto":
        return target.converted
    return None if asked == "none" else Converted(asked, config.keep)


def _check_lengths(config: PlanConfig, target: DecoderShape, draft: DecoderShape | None) -> None:
    for shape in (target, draft):
        if shape is not None and config.length > shape.longest:
            raise ValueError(
                f"sequence_length: {config.length} is above {shape.name}'s max_position_embeddings {shape.longest}"
            )


def _check_cores(config: PlanConfig, pair: Pair) -> None:
    every, name = pair.instance.cores(pair.lnc), pair.instance.name
    if config.cores is not None and not 1 <= config.cores <= every:
        raise ValueError(f"core_count: {config.cores} is outside 1 to {every}, which a {name} has at LNC {pair.lnc}")
    if config.degree is None:
        return
    known = {d.degree: d for d in degrees(pair.target, pair.instance.chip, config.cores or every, pair.route)}
    if config.degree not in known:
        raise ValueError(f"tp_degree: {config.degree} is not one of {', '.join(map(str, known))} on a {name}")
    if known[config.degree].refused:
        raise ValueError(f"tp_degree: {config.degree} on {pair.route.value}: {known[config.degree].refused}")


def _remarks(config: PlanConfig, pair: Pair) -> Iterator[str]:
    chip, draft = pair.instance.chip, pair.draft
    if pair.route is Route.NXDI and not chip.torchneuron:
        yield f"{chip.family} runs NxD Inference of SDK 2.28.1; TorchNeuron does not run there."
    elif pair.route is Route.NXDI:
        yield "NxD Inference is in maintenance and loses Trn2 and Trn3 at SDK 2.34."
    elif pair.target.kv_heads < pair.instance.cores(pair.lnc):
        yield (
            f"TorchNeuron's degrees end at {pair.target.kv_heads} KV heads; NxD Inference repeats KV heads and goes"
            " further (--backend nxdi)."
        )
    if pair.route is Route.TORCHNEURON and pair.target.converted:
        yield f"The checkpoint is {pair.target.converted.method}; this route does not keep it in eight bits."
    if pair.route is Route.NXDI and draft:
        k = pair.load.drafts
        yield f"Speculation length {k} is {k + 1} in NxD Inference's count, which includes the committed token."
    if isinstance(draft, HeadShape):
        yield "The head is counted without an embedding; one that has its own holds that too, and its target its own."
    if draft and draft.vocabulary != pair.target.vocabulary:
        yield f"Vocabularies differ ({pair.target.vocabulary} and {draft.vocabulary}): servers refuse such a pair."
    if chip.family == "trn3":
        yield "Trn3: cores and memory per core are divisions of AWS's figures per chip, degrees are taken from Trn2."
    if pair.lnc == 1 and len(chip.lnc) > 1:
        yield "LNC 1: two cores share one memory bank; each is planned half of it."


def run_plan(config: PlanConfig, as_json: bool = False) -> int:
    """Prints the plan; returns the exit code."""
    from tandem.workshops.planning.show import plan_json, plan_lines

    plan = make_plan(config)
    if as_json:
        answer: dict[str, Any] = plan_json(plan)
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join(plan_lines(plan)))
    return 0
