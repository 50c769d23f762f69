"""Estimates what one core must hold for a load (weights, KV, buffers, graphs) and the largest load that fits.

Weights and KV are counted. Buffers, graphs and the runtime's share are estimated with the formulas and constants below,
not measured on a device; every plan shows `ASSUMPTIONS`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.workshops.planning.head_shape import HeadShape
from tandem.workshops.planning.shapes import DecoderShape
from tandem.workshops.planning.sharding import Route, Weights, core_heads, kv_bytes_per_token, weight_bytes

GUARD = 128
"""Positions that NxD Inference adds to every line for the writes of idle rows (apply_seq_ids_mask)."""
GRAPH_BYTES = 64 * 2**20
USABLE = 23.5 / 25.77
LOGIT_BYTES = 4
TAIL = 8
"""Committed tokens that a draft catches up on in a step (tandem/runners/protocol.py)."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MOST_ROWS = 4096

ASSUMPTIONS = (
    "This is a plan from config.json files, not a measurement. Weights and KV are counted; the rest is estimated.",
    "Buffers: activations of one layer at the widest step (four hidden vectors, two of the MLP's, queries, keys, values"
    " a token), attention scores in float32 where no flash kernel is assumed (all steps but NxD Inference's prefill),"
    " and float32 logits of the widest step, gathered.",
    f"Graphs: {GRAPH_BYTES // 2**20} MiB a graph on every core. Assumed.",
    f"Usable memory: {USABLE:.0%} of a core's share, from one field report (Trn2: out of memory at 23.5 of 25.77 GB).",
)


@dataclass(frozen=True, slots=True)
class Load:
    """A server's load: rows, tokens per row, draft tokens per round, and the compiled shapes.

    context_buckets, decode_buckets: NxD Inference's. row_buckets, draft_buckets, and `chunk` tokens of a prefill step:
    Tandem's own steps'.
    """

    batch: int
    length: int
    drafts: int
    context_buckets: tuple[int, ...] = ()
    decode_buckets: tuple[int, ...] = ()
    row_buckets: tuple[int, ...] = ()
    draft_buckets: tuple[int, ...] = ()
    chunk: int = 64

    def resized(self, batch: int, length: int) -> Load:
        """The load with another batch and length, and a largest context bucket to match."""
        if not self.context_buckets:
            return replace(self, batch=batch, length=length)
        prompt = self.context_buckets[-1]
        prompt = length if prompt == self.length else min(prompt, length)
        return replace(self, batch=batch, length=length, context_buckets=(*self.context_buckets[:-1], prompt))


@dataclass(frozen=True, slots=True)
class Part:
    """A model on the cores of one process."""

    shape: DecoderShape
    degree: int
    weights: Weights


@dataclass(frozen=True, slots=True)
class Core:
    """Bytes used on one core, and its capacity. `features`: the target's hidden states, kept for an EAGLE head."""

    weights: int
    kv: int
    buffers: int
    graphs: int
    capacity: int
    features: int = 0

    @property
    def usable(self) -> int:
        return int(self.capacity * USABLE)

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.features + self.buffers + self.graphs

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


def core_of(parts: Sequence[Part], load: Load, route: Route, graphs: int, capacity: int) -> Core:
    """A core that holds its shares of these models."""
    return Core(
        weights=sum(weight_bytes(p.shape, p.degree, route, p.weights) for p in parts),
        kv=sum(kv_bytes(p, load, route) for p in parts),
        buffers=max(buffer_bytes(p, load, route) for p in parts),  # the models of a process take turns
        graphs=graphs * GRAPH_BYTES,
        capacity=capacity,
        features=sum(feature_bytes(p, load) for p in parts),
    )


def feature_bytes(part: Part, load: Load) -> int:
    """Bytes of hidden states that a target's steps keep for this part, which lie as its own cache does."""
    if not isinstance(part.shape, HeadShape):
        return 0
    positions = (load.batch + 1) * (load.length + max(load.chunk, load.drafts + 1, TAIL))
    return positions * part.shape.features * part.weights.bytes_each


def kv_bytes(part: Part, load: Load, route: Route) -> int:
    """Bytes of KV on one core. Tandem's cache has a spare row for padding, and room for the widest step at the end."""
    if route is Route.NXDI:
        positions = load.batch * (load.length + GUARD)
    else:
        positions = (load.batch + 1) * (load.length + max(load.chunk, load.drafts + 1))
    if isinstance(part.shape, HeadShape):  # its drafts follow a whole tail
        positions = (load.batch + 1) * (load.length + max(load.chunk, TAIL) + load.drafts + 1)
    return positions * kv_bytes_per_token(part.shape, part.degree, route, part.weights.bytes_each)


def buffer_bytes(part: Part, load: Load, route: Route) -> int:
    """Bytes of buffers: the larger of a prefill step's and a verification's, see ASSUMPTIONS."""
    shape, each = part.shape, part.weights.bytes_each
    q, kv = core_heads(shape, part.degree, route)
    per_token = (4 * shape.hidden + 2 * -(-shape.intermediate // part.degree) + (q + 2 * kv) * shape.head_dim) * each
    width = load.drafts + 1
    scores = LOGIT_BYTES * q * load.length
    prefill = load.context_buckets[-1] * per_token if route is Route.NXDI else load.chunk * (per_token + scores)
    logits = LOGIT_BYTES * shape.vocabulary
    return max(prefill + logits, load.batch * width * (per_token + scores + logits))


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, where all below it do; 0 if none does."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))
