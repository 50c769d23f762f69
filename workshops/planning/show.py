"""Formats a plan as text for a terminal, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tandem.workshops.planning.memory import ASSUMPTIONS, Core, Load
from tandem.workshops.planning.placement import Placement, Process
from tandem.workshops.planning.shapes import DecoderShape
from tandem.workshops.planning.sharding import Degree
from tandem.workshops.planning.text import table

if TYPE_CHECKING:
    from tandem.workshops.planning.plan import Plan


WIDTH = 110


def gb(count: int) -> str:
    return f"{count / 1e9:.2f}" if count < 99.5e9 else f"{count / 1e9:.0f}"


def plan_lines(plan: Plan) -> Iterator[str]:
    """A plan's lines: instance, target's degrees, both placements, remarks, assumptions."""
    yield from _heading(plan)
    yield ""
    yield f"{plan.pair.target.name} alone, GB (10^9 bytes) on each core:"
    heads = ("degree", "weights", "KV", "buffers", "graphs", "sum", "usable", "")
    yield from table(heads, [_degree_row(degree, process) for degree, process in plan.degrees])
    for placement in plan.placements:
        yield ""
        yield from _placement_lines(placement)
    for lines in (plan.remarks, ASSUMPTIONS):
        if lines:
            yield ""
        for line in lines:
            yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")


def _heading(plan: Plan) -> Iterator[str]:
    pair = plan.pair
    cores, load = pair.instance.cores(pair.lnc), pair.load
    yield (
        f"Plan for {pair.instance.name}: {counted(pair.instance.chips, 'chip')}, {cores} cores at LNC {pair.lnc},"
        f" {pair.capacity / 2**30:.0f} GiB each; {pair.route.value}"
    )
    for role, shape in (("target", pair.target), ("draft", pair.draft)):
        if shape is not None:
            yield f"  {role:7} {_shape_words(shape)}"
    yield (
        f"  load    {counted(load.batch, 'sequence')} of {load.length} tokens, {load.drafts} draft tokens a round;"
        f" {_bucket_words(load)}"
    )
    if plan.draft_degrees:
        allowed = [d.degree for d in plan.draft_degrees if not d.refused]
        yield f"  degrees of a draft on cores of its own: {_joined(allowed)}"


def _shape_words(shape: DecoderShape) -> str:
    stored = f", checkpoint in {shape.converted.method}" if shape.converted else ""
    return (
        f"{shape.name}: {shape.parameters / 1e9:.2f} billion parameters, {shape.layers} layers, {shape.heads} heads,"
        f" {shape.kv_heads} KV heads{stored}"
    )


def _bucket_words(load: Load) -> str:
    if load.context_buckets:
        return f"context buckets {_joined(load.context_buckets)}; decode buckets {_joined(load.decode_buckets)}"
    return f"prefill in chunks of {load.chunk}"


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _joined(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _degree_row(degree: Degree, process: Process | None) -> tuple[str, ...]:
    if process is None:
        return (str(degree.degree), *["-"] * 6, f"no: {degree.refused}")
    word = "fits" if process.core.fits else "too much"
    return (str(degree.degree), *_figures(process.core), f"{word}; {degree.remark}" if degree.remark else word)


def _figures(core: Core) -> tuple[str, ...]:
    return tuple(
        gb(n) for n in (core.weights, core.kv + core.features, core.buffers, core.graphs, core.total, core.usable)
    )


def _placement_lines(placement: Placement) -> Iterator[str]:
    title = f"{placement.architecture}, {counted(placement.cores, 'core')}"
    if not placement.fits:
        yield f"{title}: does not fit"
        return
    yield f"{title}{_idle_words(placement)}:"
    heads = ("process", "cores", "weights", "KV", "buffers", "graphs", "sum", "usable", "compiled", "most rows")
    rows = [
        (p.role, str(p.cores), *_figures(p.core), counted(p.graphs, "graph"), str(p.most_rows))
        for p in placement.processes
    ]
    yield from table(heads, rows)
    for process in placement.processes:
        longest = ", ".join(f"{rows} x {length}" for rows, length in process.loads)
        yield f"  {process.role}: most rows x tokens: {longest}"
        yield from (f"  {process.role}: {remark}" for remark in process.remarks)
        if process.core.features:
            yield f"  {process.role}: KV holds {gb(process.core.features)} GB of the target's hidden states"


def _idle_words(placement: Placement) -> str:
    if not placement.idle:
        return ""
    narrow = min(process.cores for process in placement.processes)
    more = placement.idle // narrow if len(placement.processes) > 1 else 0
    room = f", room for {more} more draft workers" if more > 1 else ""
    return f", {placement.idle} of them idle{room}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON; bytes are those on one core."""
    pair, load = plan.pair, plan.pair.load
    return {
        "kind": "plan, not a measurement",
        "assumptions": list(ASSUMPTIONS),
        "route": pair.route.value,
        "instance": {
            "name": pair.instance.name,
            "family": pair.instance.chip.family,
            "chips": pair.instance.chips,
            "lnc": pair.lnc,
            "cores": pair.instance.cores(pair.lnc),
            "bytes_per_core": pair.capacity,
        },
        "load": {
            "batch": load.batch,
            "sequence_length": load.length,
            "speculation_length": load.drafts,
            "context_buckets": list(load.context_buckets),
            "decode_buckets": list(load.decode_buckets),
            "batch_buckets": list(load.row_buckets),
            "draft_buckets": list(load.draft_buckets),
            "prefill_chunk": load.chunk,
        },
        "target": _shape_json(pair.target),
        "draft": _shape_json(pair.draft) if pair.draft else None,
        "target_degrees": [{**_degree_json(d), "alone": _process_json(p) if p else None} for d, p in plan.degrees],
        "draft_degrees": [_degree_json(d) for d in plan.draft_degrees],
        "placements": [_placement_json(placement) for placement in plan.placements],
        "storage": {**asdict(plan.storage), "disk": plan.storage.disk},
        "remarks": list(plan.remarks),
    }


def _shape_json(shape: DecoderShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "parameters": shape.parameters,
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "checkpoint_quantization": shape.converted.method if shape.converted else None,
    }


def _degree_json(degree: Degree) -> dict[str, Any]:
    return {"tp_degree": degree.degree, "refused": degree.refused or None, "remark": degree.remark or None}


def _placement_json(placement: Placement) -> dict[str, Any]:
    return {
        "architecture": placement.architecture,
        "cores": placement.cores,
        "fits": placement.fits,
        "idle_cores": placement.idle,
        "why": placement.why or None,
        "processes": [_process_json(process) for process in placement.processes],
    }


def _process_json(process: Process) -> dict[str, Any]:
    core = process.core
    return {
        "role": process.role,
        "cores": process.cores,
        "tp_degrees": list(process.degrees),
        "fits": core.fits,
        "bytes_per_core": {
            "weights": core.weights,
            "kv": core.kv,
            "features": core.features,
            "buffers": core.buffers,
            "graphs": core.graphs,
            "total": core.total,
            "usable": core.usable,
        },
        "graphs": process.graphs,
        "most_rows": process.most_rows,
        "longest_by_rows": [{"batch": batch, "sequence_length": length} for batch, length in process.loads],
        "remarks": list(process.remarks),
    }
