"""Derives NeuronConfig's fields and the compiled shapes from Tandem's flags and the user's fields."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.checkpoints.adapter_files import Adapter
from tandem.runners.load_runner import Shape
from tandem_nxdi.adapters import lora_config
from tandem_nxdi.nxdi_settings import OURS, NxdiSettings
from tandem_nxdi.refusals import EAGLE3_NEEDS, refuse_broken

TILE = 128  # KV caches of fused models are stored in tiles of so many positions where the length allows it


class Kind(enum.Enum):
    """A model fed one token a step, one fed a window, or draft and target in one graph."""

    PLAIN = "plain"
    WINDOW = "window"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Layout:
    """The compiled shapes, in positions and tokens per row.

    A step is fed `width` tokens and writes `span` positions. For a mask of L positions NxDI picks the first bucket
    above L + `reserved`, or the largest if equal (model_wrapper.py). `reads`: the largest L + reserved of every smaller
    decode bucket. `chunks`: the longest prompt of every context encoding bucket.
    """

    lines: int
    capacity: int
    width: int
    span: int
    reserved: int
    reads: tuple[int, ...]
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """NeuronConfig's keyword arguments for a compiled folder (`draft`: if fused), and the shapes.

    `tokens_only`: logits stay on the device: greedy requests alone. `adapters`: compiled revisions, in order.
    """

    kind: Kind
    neuron: Mapping[str, Any]
    draft: Mapping[str, Any] | None
    layout: Layout
    max_length: int
    tokens_only: bool
    eagle: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)


def kind_of(fused: bool, verifies: bool, shape: Shape) -> Kind:
    return Kind.FUSED if fused else Kind.WINDOW if verifies and shape.max_draft else Kind.PLAIN


def check_settings(fused: bool, shape: Shape, settings: NxdiSettings) -> None:
    """Refuses fields that NxD Inference breaks, without needing it; an EAGLE head's are checked with its folder."""
    if not settings.eagle:
        kind = kind_of(fused and settings.pair != "apart", True, shape)
        refuse_broken(_fields(kind, shape, settings, None, eagle3=False))


def plan_build(
    kind: Kind,
    shape: Shape,
    settings: NxdiSettings,
    dtype: str | None = None,
    eagle3: bool = False,
    adapters: Sequence[Adapter] = (),
) -> Build:
    """Raises ValueError if flags contradict each other or NxDI is known to break.

    `dtype`: None is the checkpoint's. `eagle3`: the draft is an EAGLE-3 head; with `settings.eagle` alone, an EAGLE-1
    head. `adapters`: the settings', read.
    """
    if adapters and kind is Kind.FUSED:
        raise ValueError("adapters: NxD Inference passes none to a fused graph (model_base.py); use --pair apart")
    fields = _fields(kind, shape, settings, dtype, eagle3)
    held = lora_config(fields.get("lora_config") or {}, settings.adapters, adapters, shape.slots)
    refuse_broken(fields)
    fields |= {"lora_config": held} if held else {}
    layout = _layout(kind, shape.slots, fields)
    draft = None
    if kind is Kind.FUSED:
        draft = _draft_fields(fields, settings)
    elif settings.draft_neuron_config or settings.eagle:
        raise ValueError(
            f"{'eagle' if settings.eagle else 'draft_neuron_config'}: only --role fused_target has a draft in its graph"
        )
    usable = layout.capacity - (layout.span if kind is Kind.FUSED else 0)
    tokens_only = fields.get("on_device_sampling_config") is not None and not fields.get("output_logits")
    length, revisions = min(shape.max_length, usable), {each.name: each.revision for each in adapters}
    return Build(kind, fields, draft, layout, length, tokens_only, settings.eagle, revisions)


def _fields(kind: Kind, shape: Shape, settings: NxdiSettings, dtype: str | None, eagle3: bool) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(json.dumps(dict(settings.neuron_config)))  # NeuronConfig sorts lists in place
    span = shape.max_draft + 1
    if kind is Kind.FUSED and shape.max_draft < 1:
        raise ValueError(f"speculation_length: {shape.max_draft} leaves a fused model nothing to draft")
    ours: dict[str, Any] = {
        "batch_size": shape.slots,
        "max_batch_size": shape.slots,
        "tkg_batch_size": shape.slots,
        "spec_batch_size": shape.slots,
        "kv_cache_batch_size": shape.slots,
        "ctx_batch_size": 1,
        "is_continuous_batching": shape.slots > 1,
        "speculation_length": 0 if kind is Kind.PLAIN else span,
        "enable_fused_speculation": kind is Kind.FUSED,
        "enable_eagle_speculation": settings.eagle,
        "is_eagle_draft": False,
        "tp_degree": settings.tp_degree,
    }
    if dtype:
        ours["torch_dtype"] = dtype
    if eagle3:
        ours["is_eagle3"] = True
    for name, flag in OURS.items():
        if name in given and given[name] != ours.get(name):
            raise ValueError(
                f"neuron_config: {name} is {given[name]!r}, but --{flag} makes it {ours.get(name, 'not given')}"
            )
    fields = given | ours
    fields.setdefault("padding_side", "right")
    if eagle3:
        for name in EAGLE3_NEEDS:
            fields.setdefault(name, True)
    sampling = fields.get("on_device_sampling_config")
    if sampling and sampling.get("do_sample") and sampling.get("top_k") == 1:  # an argmax, which speculation allows
        fields["on_device_sampling_config"] = {**sampling, "do_sample": False}
    _lengths(fields, kind, shape.max_length, span)
    if kind is Kind.FUSED:
        fields.setdefault("on_device_sampling_config", {"do_sample": False})
    # kv_cache_quant alone is a compiler flag; kv_quant_config quantizes the cache.
    if fields.get("kv_cache_quant"):
        fields.setdefault("kv_quant_config", {})
    elif fields.get("kv_quant_config") is not None:
        fields["kv_cache_quant"] = True
    return fields


def _lengths(fields: dict[str, Any], kind: Kind, wanted: int, span: int) -> None:
    """Sets seq_len and related fields. A fused step cannot slide back at the end, so it gets room for its drafts."""
    decode, context = fields.get("token_generation_buckets"), fields.get("context_encoding_buckets")
    if kind is Kind.FUSED:
        wanted += span
        wanted += -wanted % TILE if wanted > TILE else 0
    fields.setdefault("seq_len", max(decode) if decode else wanted)
    length = fields["seq_len"]
    fields.setdefault("max_length", length)
    fields.setdefault("n_positions", length)
    if not fields["max_length"] == fields["n_positions"] == length:
        raise ValueError(f"neuron_config: seq_len {length}, max_length and n_positions must be one number")
    fields.setdefault("max_context_length", max(context) if context else length)
    if fields["max_context_length"] > length:
        raise ValueError(f"neuron_config: max_context_length {fields['max_context_length']} is above seq_len {length}")
    if length <= span + 1 or fields["max_context_length"] < 2:
        raise ValueError(f"sequence_length: {length} has no room for steps of {span} tokens")
    if decode or context:
        if fields.get("enable_bucketing") is False:
            raise ValueError("neuron_config: buckets are only read with enable_bucketing")
        fields["enable_bucketing"] = True
    for name, end in (("token_generation_buckets", "seq_len"), ("context_encoding_buckets", "max_context_length")):
        if fields.get(name) and max(fields[name]) != fields[end]:
            raise ValueError(f"neuron_config: the largest of {name} is {max(fields[name])}, {end} is {fields[end]}")


def _draft_fields(fields: Mapping[str, Any], settings: NxdiSettings) -> dict[str, Any]:
    """The target's fields, overridden by the draft's. sdk.py sets its speculation flags later."""
    own = dict(settings.draft_neuron_config)
    for name in ("batch_size", "seq_len", "max_length", "max_context_length", "speculation_length"):
        if name in own and own[name] != fields[name]:
            raise ValueError(f"draft_neuron_config: {name} is the target's, {fields[name]}, in a fused model")
    degree = own.get("tp_degree", fields["tp_degree"])
    if degree < 1 or fields["tp_degree"] % degree:
        raise ValueError(f"draft_neuron_config: tp_degree {degree} does not divide the target's {fields['tp_degree']}")
    draft = {**fields, **own, "modules_to_not_convert": own.get("modules_to_not_convert")}
    if "draft_model_modules_to_not_convert" in fields:
        draft["modules_to_not_convert"] = fields["draft_model_modules_to_not_convert"]
    if not draft.get("quantized"):
        draft.pop("quantized_checkpoints_path", None)
    if own.get("torch_dtype", fields.get("torch_dtype")) != fields.get("torch_dtype") and (
        fields.get("cast_type") != "as-declared"
    ):
        raise ValueError('draft_neuron_config: another torch_dtype than the target\'s needs cast_type "as-declared"')
    return draft


def _layout(kind: Kind, lines: int, fields: Mapping[str, Any]) -> Layout:
    capacity, span = fields["seq_len"], 1 if kind is Kind.PLAIN else fields["speculation_length"]
    decode = sorted(fields.get("token_generation_buckets") or automatic_buckets(fields, capacity))
    context = sorted(fields.get("context_encoding_buckets") or automatic_buckets(fields, fields["max_context_length"]))
    if kind is not Kind.PLAIN and span in context:
        raise ValueError(
            f"speculation_length: a context bucket of just {span} tokens is traced as a verification (model_base.py)"
        )
    return Layout(
        lines=lines,
        capacity=capacity,
        width=span if kind is Kind.WINDOW else 1,
        span=span,
        reserved=0 if kind is Kind.PLAIN else span,
        reads=tuple(bucket - 1 for bucket in decode[:-1] if bucket > 2 * span),
        chunks=(*(bucket - 1 for bucket in context[:-1] if bucket > 2), context[-1]),
    )


def automatic_buckets(fields: Mapping[str, Any], longest: int) -> list[int]:
    """NxDI's default buckets (modules/autobucketing.py): powers of two from 128."""
    if not fields.get("enable_bucketing") or longest == TILE:
        return [longest]
    return [*(2**i for i in range(TILE.bit_length() - 1, round(math.log2(longest)))), longest]
