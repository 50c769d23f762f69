"""Divides a model over cores: heads, weights and KV of one core, and the degrees that each route allows.

NxD Inference pads query heads and repeats KV heads until every core has some (its gqa.py and the GQA section of the
features guide). On TorchNeuron, transformers' own plan under DTensor applies: it divides linear layers and the output
matrix but not the embedding, and pads or repeats nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tandem.host.instances import Chip
from tandem.workshops.planning.head_shape import HeadShape
from tandem.workshops.planning.shapes import Converted, DecoderShape, Linear

SCALE_BYTES = 4
SEEN_GROUPS = (1, 4, 8, 16, 32, 64)


class Route(Enum):
    """The software that runs the model on the device."""

    TORCHNEURON = "TorchNeuron"
    NXDI = "NxD Inference"


@dataclass(frozen=True, slots=True)
class Weights:
    """How weights are stored: bytes each, and which matrices use one byte and a scale per output instead."""

    bytes_each: int
    eight_bit: Converted | None = None


@dataclass(frozen=True, slots=True)
class Degree:
    """A tensor-parallel degree. `refused`: why it is impossible. `remark`: its cost, or what is not known about it."""

    degree: int
    refused: str = ""
    remark: str = ""


def core_heads(shape: DecoderShape, degree: int, route: Route) -> tuple[int, int]:
    """Query and KV heads of one core."""
    q = -(-shape.heads // degree)
    if route is Route.TORCHNEURON or shape.kv_heads % degree == 0:
        return q, max(1, shape.kv_heads // degree)
    if shape.heads == shape.kv_heads or degree % shape.kv_heads:
        return q, q  # CONVERT_TO_MHA
    return q, 1  # REPLICATE_TO_TP_DEGREE


def weight_bytes(shape: DecoderShape, degree: int, route: Route, weights: Weights) -> int:
    """Bytes of weights on one core. A head is whole on each."""
    if isinstance(shape, HeadShape):
        return shape.parameters * weights.bytes_each
    q, kv = core_heads(shape, degree, route)
    units = {"q": q * shape.head_dim, "kv": kv * shape.head_dim, "columns": -(-shape.intermediate // degree)}
    total = 0
    for linear in shape.linears():
        for layer in range(shape.layers):
            eight = weights.eight_bit is not None and weights.eight_bit.covers(f"model.layers.{layer}.{linear.name}")
            total += _linear_bytes(shape, linear, units[linear.split], weights.bytes_each, eight)
    return (
        total
        + (shape.fc_parameters + shape.norm_parameters + _table_weights(shape, degree, route)) * weights.bytes_each
    )


def _linear_bytes(shape: DecoderShape, linear: Linear, unit: int, bytes_each: int, eight: bool) -> int:
    """Bytes of one layer's matrix on one core: one side is the hidden size, the other the core's share."""
    outputs = unit if linear.inputs == shape.hidden and linear.name != "self_attn.o_proj" else shape.hidden
    bias = outputs * bytes_each if linear.bias else 0
    matrix = unit * shape.hidden
    return bias + (matrix + outputs * SCALE_BYTES if eight else matrix * bytes_each)


def _table_weights(shape: DecoderShape, degree: int, route: Route) -> int:
    """Parameters of embedding and output matrix on one core. NxD Inference divides both, and unties tied ones."""
    table = shape.vocabulary * shape.hidden
    part = -(-shape.vocabulary // degree) * shape.hidden
    if route is Route.NXDI:
        return 2 * part
    return table if shape.tied else table + part


def kv_bytes_per_token(shape: DecoderShape, degree: int, route: Route, bytes_each: int) -> int:
    """Bytes of one position's keys and values on one core."""
    return 2 * shape.layers * core_heads(shape, degree, route)[1] * shape.head_dim * bytes_each


def degrees(shape: DecoderShape, chip: Chip, cores: int, route: Route) -> tuple[Degree, ...]:
    """Every degree that the runtime supports on that many cores, with the reason if the model refuses it."""
    return tuple(_assess(shape, degree, route) for degree in chip.degrees if degree <= cores)


def _assess(shape: DecoderShape, degree: int, route: Route) -> Degree:
    refused = "; ".join(_against(shape, degree, route))
    if refused:
        return Degree(degree, refused)
    if route is Route.TORCHNEURON:
        seen = degree in SEEN_GROUPS
        return Degree(degree, remark="" if seen else "collectives of this size: not seen to work")
    _, kv = core_heads(shape, degree, route)
    copies = kv * degree // shape.kv_heads
    return Degree(degree, remark=f"every KV head is kept {copies} times" if copies > 1 else "")


def _against(shape: DecoderShape, degree: int, route: Route) -> Iterator[str]:
    if shape.heads % degree:
        yield f"{shape.heads} heads are not divisible by {degree}"
    if route is Route.TORCHNEURON:
        if shape.kv_heads % degree:
            yield f"{shape.kv_heads} KV heads are not divisible by {degree}"
        if shape.intermediate % degree:
            yield f"intermediate_size {shape.intermediate} is not divisible by {degree}"


def padding_remark(shape: DecoderShape, degree: int) -> str:
    """A remark that NxD Inference pads the model's heads to a multiple of `degree`; empty if it does not."""
    if shape.heads % degree == 0:
        return ""
    return f"{shape.name}'s {shape.heads} heads are padded to {-(-shape.heads // degree) * degree}"
