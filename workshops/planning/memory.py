"""Bytes of a model on one core: shares of weights and KV, and estimated buffers.

NxD Inference pads query heads and repeats KV heads until every core has some (its gqa.py; GQA section of the features
guide). TorchNeuron uses transformers' plan under DTensor: it divides linear layers and the output matrix, not the
embedding, and neither pads nor repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tandem.host.instances import Chip
from tandem.workshops.planning.shapes import DecoderShape, EightBit, Linear

GUARD = 128
"""Positions that NxD Inference adds to rows for idle writes (apply_seq_ids_mask)."""
GRAPHS_BYTES = 2**30
USABLE = 23.5 / 25.77
LOGIT_BYTES = 4
SCALE_BYTES = 4
TAIL = 8
"""Committed tokens in a draft's first step (tandem/runners/protocol.py)."""

ASSUMPTIONS = (
    "This is a plan from config.json files, not a measurement. Weights and KV are counted; the rest is estimated.",
    "Buffers: activations of one layer at the widest step, attention scores in float32 (but in NxD Inference's"
    f" prefill), float32 logits, and {GRAPHS_BYTES / 2**30:g} GiB for compiled graphs.",
    f"Usable memory: {USABLE:.0%} of a core's share, from one field report (Trn2: out of memory at 23.5 of 25.77 GB).",
)


class Route(Enum):
    """The software that runs the model on the device."""

    TORCHNEURON = "TorchNeuron"
    NXDI = "NxD Inference"


@dataclass(frozen=True, slots=True)
class Weights:
    """Stored bytes each; `eight_bit`: matrices with one byte, and a scale per output."""

    bytes_each: int
    eight_bit: EightBit | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Rows, tokens per row, draft tokens per round, prompt tokens per step."""

    batch: int
    length: int
    drafts: int
    chunk: int = 64


@dataclass(frozen=True, slots=True)
class Part:
    """A model on one process's cores."""

    shape: DecoderShape
    degree: int
    weights: Weights


@dataclass(frozen=True, slots=True)
class Core:
    """Bytes on one core. `kv` includes hidden states kept for an EAGLE-3 head."""

    weights: int
    kv: int
    buffers: int
    capacity: int

    @property
    def usable(self) -> int:
        return int(self.capacity * USABLE)

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.buffers

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


def core_of(parts: Sequence[Part], load: Load, route: Route, capacity: int) -> Core:
    """One core's shares of these models, which take turns at the buffers."""
    return Core(
        weights=sum(weight_bytes(part.shape, part.degree, route, part.weights) for part in parts),
        kv=sum(kv_bytes(part, load, route) for part in parts),
        buffers=max(buffer_bytes(part, load, route) for part in parts) + GRAPHS_BYTES,
        capacity=capacity,
    )


def kv_bytes(part: Part, load: Load, route: Route) -> int:
    """Bytes of KV on one core. Tandem's cache has a spare row for padding, and room for the widest step at the end."""
    if route is Route.NXDI:
        positions = load.batch * (load.length + GUARD)
    else:
        positions = (load.batch + 1) * (load.length + max(load.chunk, load.drafts + 1))
    each = kv_bytes_per_token(part.shape, part.degree, route, part.weights.bytes_each)
    if not part.shape.features:
        return positions * each
    own = (load.batch + 1) * (load.length + max(load.chunk, TAIL) + load.drafts + 1)  # drafts follow a whole tail
    features = (load.batch + 1) * (load.length + max(load.chunk, load.drafts + 1, TAIL)) * part.shape.features
    return own * each + features * part.weights.bytes_each


def buffer_bytes(part: Part, load: Load, route: Route) -> int:
    """Bytes of buffers: the larger of a prefill step's and a verification's."""
    shape, each = part.shape, part.weights.bytes_each
    q, kv = core_heads(shape, part.degree, route)
    per_token = (4 * shape.hidden + 2 * -(-shape.intermediate // part.degree) + (q + 2 * kv) * shape.head_dim) * each
    scores, logits = LOGIT_BYTES * q * load.length, LOGIT_BYTES * shape.vocabulary
    prefill = load.length * per_token if route is Route.NXDI else load.chunk * (per_token + scores)
    return max(prefill + logits, load.batch * (load.drafts + 1) * (per_token + scores + logits))


def core_heads(shape: DecoderShape, degree: int, route: Route) -> tuple[int, int]:
    """Query and KV heads of one core."""
    q = -(-shape.heads // degree)
    if route is Route.TORCHNEURON or shape.kv_heads % degree == 0:
        return q, max(1, shape.kv_heads // degree)
    if shape.heads == shape.kv_heads or degree % shape.kv_heads:
        return q, q  # CONVERT_TO_MHA
    return q, 1  # REPLICATE_TO_TP_DEGREE


def kv_bytes_per_token(shape: DecoderShape, degree: int, route: Route, bytes_each: int) -> int:
    """Bytes of one position's keys and values on one core."""
    return 2 * shape.layers * core_heads(shape, degree, route)[1] * shape.head_dim * bytes_each


def weight_bytes(shape: DecoderShape, degree: int, route: Route, weights: Weights) -> int:
    """Bytes of weights on one core. An EAGLE-3 head is whole on each."""
    if shape.features:
        return shape.parameters * weights.bytes_each
    q, kv = core_heads(shape, degree, route)
    units = {"q": q * shape.head_dim, "kv": kv * shape.head_dim, "columns": -(-shape.intermediate // degree)}
    total = (shape.fc_parameters + shape.norm_parameters + _tables(shape, degree, route)) * weights.bytes_each
    for linear in shape.linears():
        for layer in range(shape.layers):
            eight = weights.eight_bit is not None and weights.eight_bit.covers(f"model.layers.{layer}.{linear.name}")
            total += _linear_bytes(shape, linear, units[linear.split], weights.bytes_each, eight)
    return total


def _linear_bytes(shape: DecoderShape, linear: Linear, unit: int, bytes_each: int, eight: bool) -> int:
    """Bytes of a layer's matrix on one core: one side is the hidden size, the other is divided."""
    outputs = unit if linear.inputs == shape.hidden and linear.name != "self_attn.o_proj" else shape.hidden
    bias = outputs * bytes_each if linear.bias else 0
    matrix = unit * shape.hidden
    return bias + (matrix + outputs * SCALE_BYTES if eight else matrix * bytes_each)


def _tables(shape: DecoderShape, degree: int, route: Route) -> int:
    """Parameters of embedding and output matrix on one core. NxD Inference divides both, and unties tied ones."""
    table = shape.vocabulary * shape.hidden
    part = -(-shape.vocabulary // degree) * shape.hidden
    if route is Route.NXDI:
        return 2 * part
    return table if shape.tied else table + part


def degrees(shape: DecoderShape, chip: Chip, cores: int, route: Route) -> dict[int, str]:
    """The runtime's degrees on `cores`, and why the model refuses each ("" if not)."""
    return {degree: refusal(shape, degree, route) for degree in chip.degrees if degree <= cores}


def refusal(shape: DecoderShape, degree: int, route: Route) -> str:
    against = []
    if shape.heads % degree and not shape.features:
        against.append(f"{shape.heads} heads are not divisible by {degree}")
    if route is Route.TORCHNEURON:
        if shape.kv_heads % degree:
            against.append(f"{shape.kv_heads} KV heads are not divisible by {degree}")
        if shape.intermediate % degree:
            against.append(f"intermediate_size {shape.intermediate} is not divisible by {degree}")
    return "; ".join(against)
