"""`--role plan`: the degrees at which target, draft and both fused fit on an instance, from config.json.

NxD Inference pads query heads and repeats KV heads until every core has some (its gqa.py; GQA section of the features
guide). TorchNeuron uses transformers' plan under DTensor: it divides linear layers and the output matrix, not the
embedding, and neither pads nor repeats.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tandem.checkpoints.family_configs import MATRICES, matrix_name
from tandem.host.instances import Instance, instance_named
from tandem.workshops.planning.shapes import DecoderShape, read_shape

BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
QUANTIZATIONS = ("auto", "none", "int8", "f8e4m3", "f8e5m2")
SYSTEM_BYTES = 100 * 10**9  # disk for image, packages and compiled graphs; assumed
LEAST_VOLUME = 512 * 10**9  # AWS's least root volume of such an instance (its page on updating a DLAMI, SDK 2.33)
GUARD = 128  # positions that NxD Inference adds to rows for idle writes (apply_seq_ids_mask)
GRAPHS_BYTES = 2**30
USABLE = 23.5 / 25.77
FLOAT_BYTES = 4  # of logits, scores, and scales of eight-bit weights
ASSUMPTIONS = (
    "This is a plan from config.json files, not a measurement. Weights and KV are counted; the rest is estimated.",
    "Buffers: activations of one layer at the widest step, attention scores in float32 (but in NxD Inference's"
    f" prefill), float32 logits, and {GRAPHS_BYTES / 2**30:g} GiB for compiled graphs.",
    f"Usable memory: {USABLE:.0%} of a core's share, from one field report (Trn2: out of memory at 23.5 of 25.77 GB).",
)


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
class Process:
    """Bytes on one core. `kind`: target, draft or fused."""

    kind: str
    degree: int
    refused: str = ""
    weights: int = 0
    kv: int = 0
    buffers: int = 0
    usable: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.buffers

    @property
    def fits(self) -> bool:
        return not self.refused and self.total <= self.usable


@dataclass(frozen=True, slots=True)
class Pair:
    """Models on an instance. `nxdi`: with NxD Inference, else TorchNeuron. `stored`: the target's checkpoint."""

    config: PlanConfig
    instance: Instance
    lnc: int
    nxdi: bool
    target: DecoderShape
    draft: DecoderShape | None
    stored: DecoderShape

    @property
    def cores(self) -> int:
        return self.instance.cores(self.lnc)

    @property
    def models(self) -> tuple[DecoderShape, ...]:
        return (self.target, self.draft) if self.draft else (self.target,)

    def processes(self) -> tuple[Process, ...]:
        """Each process at each degree. Raises ValueError for an impossible one."""
        kinds = ("target", "draft", "fused") if self.draft else ("target",)
        found = tuple(
            process
            for kind in kinds
            for process in processes_of(self, kind, self.cores)
            if self.config.degree in (None, process.degree) or kind == "draft"
        )
        if not found:
            known = ", ".join(str(degree) for degree in self.instance.degrees if degree <= self.cores)
            raise ValueError(f"tp_degree: {self.config.degree} is not one of {known} on a {self.instance.name}")
        return found


def pair_of(config: PlanConfig, instance: Instance) -> Pair:
    """Reads both configurations. Raises ValueError for a missing key, or an impossible length or quantization."""
    nxdi = config.backend == "nxdi" or not instance.torchneuron
    if not nxdi and config.quantization not in ("auto", "none"):
        raise ValueError(f"quantization: {config.quantization} is NxD Inference's; add --backend nxdi")
    target = read_shape(config.target_model, "target_model")
    draft = read_shape(config.draft_model, "draft_model") if config.draft_model else None
    for shape in (target, draft):
        if shape is not None and config.length > (most := shape.config.max_position_embeddings):
            raise ValueError(f"sequence_length: {config.length} is above {shape.name}'s max_position_embeddings {most}")
    each, kept = BYTES[config.dtype], {"auto": target.kept, "none": None}.get(config.quantization, config.keep)
    return Pair(
        config,
        instance,
        instance.checked_lnc(config.lnc),
        nxdi,
        replace(target, bytes_each=each, kept=kept if nxdi else None),
        draft and replace(draft, bytes_each=each, kept=draft.kept if nxdi else None),
        replace(target, bytes_each=each),
    )


def processes_of(pair: Pair, kind: str, cores: int) -> list[Process]:
    """A process at each of the runtime's degrees on `cores`, ascending."""
    return [_process(pair, kind, degree) for degree in pair.instance.degrees if degree <= cores]


def _process(pair: Pair, kind: str, degree: int) -> Process:
    # NxD Inference divides a fused draft like the target; Tandem's steps repeat it on every core.
    main = pair.draft if kind == "draft" else pair.target
    assert main is not None
    parts = [(main, degree)]
    if kind == "fused":
        assert pair.draft is not None
        parts.append((pair.draft, degree if pair.nxdi else 1))
    if refused := _refusal(main, degree, pair.nxdi):
        return Process(kind, degree, refused)
    return Process(
        kind,
        degree,
        weights=sum(weight_bytes(model, each, pair.nxdi) for model, each in parts),
        kv=sum(kv_bytes(model, each, pair) for model, each in parts),
        buffers=max(_buffer_bytes(model, each, pair) for model, each in parts) + GRAPHS_BYTES,
        usable=int(pair.instance.core_bytes(pair.lnc) * USABLE),
    )


def _refusal(shape: DecoderShape, degree: int, nxdi: bool) -> str:
    of = shape.config
    counts = {"heads": of.num_attention_heads}
    if not nxdi:
        counts |= {"KV heads": of.num_key_value_heads, "columns of intermediate_size": of.intermediate_size}
    return "; ".join(
        f"{count} {what} are not divisible by {degree}" for what, count in counts.items() if count % degree
    )


def kv_bytes(model: DecoderShape, degree: int, pair: Pair) -> int:
    """Bytes of KV on one core. Tandem's cache has a spare row for padding, and room for the widest step at the end."""
    config = pair.config
    rows, length, step = config.batch + 1, config.length, max(_chunk(config), config.drafts + 1)
    positions = config.batch * (length + GUARD) if pair.nxdi else rows * (length + step)
    heads = core_heads(model, degree, pair.nxdi)[1]
    return positions * 2 * model.config.num_hidden_layers * heads * model.config.head_dim * model.bytes_each


def _buffer_bytes(shape: DecoderShape, degree: int, pair: Pair) -> int:
    """The larger of a prefill step's and a verification's."""
    config, of = pair.config, shape.config
    q, kv = core_heads(shape, degree, pair.nxdi)
    per_token = 4 * of.hidden_size + 2 * -(-of.intermediate_size // degree) + (q + 2 * kv) * of.head_dim
    per_token *= shape.bytes_each
    scores, logits = FLOAT_BYTES * q * config.length, FLOAT_BYTES * of.vocab_size
    prefill = config.length * per_token if pair.nxdi else _chunk(config) * (per_token + scores)
    return max(prefill + logits, config.batch * (config.drafts + 1) * (per_token + scores + logits))


def _chunk(config: PlanConfig) -> int:
    return min(config.chunk, config.length)


def core_heads(shape: DecoderShape, degree: int, nxdi: bool) -> tuple[int, int]:
    """Query and KV heads of one core."""
    heads, kv_heads = shape.config.num_attention_heads, shape.config.num_key_value_heads
    q = -(-heads // degree)
    if not nxdi or kv_heads % degree == 0:
        return q, max(1, kv_heads // degree)
    if heads == kv_heads or degree % kv_heads:
        return q, q  # CONVERT_TO_MHA
    return q, 1  # REPLICATE_TO_TP_DEGREE


def weight_bytes(shape: DecoderShape, degree: int, nxdi: bool) -> int:
    """Bytes of weights on one core."""
    of, (q, kv) = shape.config, core_heads(shape, degree, nxdi)
    columns = -(-of.intermediate_size // degree)
    units = {"q": q * of.head_dim, "k": kv * of.head_dim, "v": kv * of.head_dim, "o": q * of.head_dim}
    total = (shape.norm_parameters + _tables(shape, degree, nxdi)) * shape.bytes_each
    for name in MATRICES:  # one side is the hidden size, the other is divided
        unit = units.get(name, columns)
        outputs, weights = of.hidden_size if name in ("o", "down") else unit, unit * of.hidden_size
        for layer in range(of.num_hidden_layers):
            eight = shape.eight_bit(matrix_name(layer, name))
            total += weights + outputs * FLOAT_BYTES if eight else weights * shape.bytes_each
            total += outputs * shape.bytes_each if name in of.biases else 0
    return total


def _tables(shape: DecoderShape, degree: int, nxdi: bool) -> int:
    """Parameters of embedding and output matrix on one core. NxD Inference divides both, and unties tied ones."""
    table = shape.config.vocab_size * shape.config.hidden_size
    part = -(-shape.config.vocab_size // degree) * shape.config.hidden_size
    if nxdi:
        return 2 * part
    return table if shape.config.tie_word_embeddings else table + part


def disk_bytes(pair: Pair) -> dict[str, int]:
    # NxD Inference writes a converted copy of FP8 checkpoints, and each core's share of every process.
    stored = (pair.stored, *pair.models[1:])
    found = {"checkpoints": sum(weight_bytes(model, 1, False) for model in stored)}
    if pair.nxdi:
        if pair.target.kept is not None:
            found["a converted copy"] = weight_bytes(pair.target, 1, False)
        fitting = {process.kind: process for process in reversed(pair.processes()) if process.fits}
        found["the cores' shares"] = sum(p.weights * p.degree for p in fitting.values())
    return found | {"system and graphs (assumed)": SYSTEM_BYTES}


def plan_lines(pair: Pair) -> Iterator[str]:
    """The plan as a page's lines."""
    config, capacity = pair.config, pair.instance.core_bytes(pair.lnc)
    yield (
        f"Plan for {pair.instance.name}: {pair.cores} cores at LNC {pair.lnc}, {capacity / 2**30:.0f} GiB each;"
        f" {'NxD Inference' if pair.nxdi else 'TorchNeuron'}"
    )
    for role, shape in zip(("target", "draft"), pair.models, strict=False):
        of = shape.config
        yield (
            f"  {role:7} {shape.name}: {shape.parameters / 1e9:.2f} billion parameters, {of.num_hidden_layers} layers,"
            f" {of.num_attention_heads} heads, {of.num_key_value_heads} KV heads"
        )
    yield f"  load    batch {config.batch}, {config.length} tokens each, {config.drafts} draft tokens a round"
    yield ""
    yield f"GB (10^9 bytes) on each core, of {int(capacity * USABLE) / 1e9:.2f} usable:"
    yield "  process  degree  weights      KV  buffers     sum"
    yield from map(_process_line, pair.processes())
    yield ""
    disk = disk_bytes(pair)
    parts = ", ".join(f"{count / 1e9:,.0f} of {name}" for name, count in disk.items())
    whole = max(sum(disk.values()), LEAST_VOLUME)
    least = "; AWS asks for no less" if whole == LEAST_VOLUME else ""
    for line in (f"Disk: {whole / 1e9:,.0f} GB: {parts}{least}.", *ASSUMPTIONS):
        yield from textwrap.wrap(line, 110, subsequent_indent="  ")


def _process_line(process: Process) -> str:
    if process.refused:
        return f"  {process.kind:7}  {process.degree:>6}  no: {process.refused}"
    parts = (process.weights, process.kv, process.buffers, process.total)
    weights, kv, buffers, total = (f"{count / 1e9:>7.2f}" for count in parts)
    word = "fits" if process.fits else "too much"
    return f"  {process.kind:7}  {process.degree:>6}  {weights} {kv}  {buffers} {total}  {word}"


def plan_json(pair: Pair) -> dict[str, Any]:
    """The plan as JSON; bytes on one core."""
    return {
        "kind": "plan, not a measurement",
        "assumptions": ASSUMPTIONS,
        "instance": {"name": pair.instance.name, "lnc": pair.lnc, "cores": pair.cores},
        "load": asdict(pair.config),
        "models": {model.name: model.parameters for model in pair.models},
        "processes": [asdict(p) | {"total": p.total, "fits": p.fits} for p in pair.processes()],
        "disk": disk_bytes(pair),
    }


def run_plan(config: PlanConfig, as_json: bool = False) -> int:
    """Prints the plan; returns the exit code."""
    pair = pair_of(config, instance_named(config.instance))
    print(json.dumps(plan_json(pair), indent=2) if as_json else "\n".join(plan_lines(pair)))
    return 0
