"""Computes in numpy what native steps compute, to check them; test_reference.py checks these formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.family import NO_ROPE
from tandem.checkpoints.family_weights import HEAD, NORM, FamilyWeights, matrix_name
from tandem.checkpoints.gguf_blocks import FORMATS, Blocks
from tandem.checkpoints.numbers import Floats, Stored, of_floats
from tandem.runners.native.library import MATRICES
from tandem.runners.native.model import embedding_scale, linear, norms_of
from tandem.runners.native.rotary import rotary_tables
from tandem.runners.native.weights import DENSE, Linear, Packing, decoded, encoded

Round = Callable[[Floats], Floats]
Matrices = Mapping[str, Callable[[Floats], Floats]]
GROUP = 32
PARTS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # matrices packed together, in the order of MATRICES
_MADE_HERE = ("q8_0", "q4_1")
_LANES = 16
_ROWS = 1 << 13  # outputs of a matrix that are made float32 at a time


class Product:
    """A linear layer: blocks and activations in groups of 32, or dense."""

    def __init__(self, linear: Linear, blocks: Blocks | None, form: int, library: object, round: Round) -> None:
        """`blocks`: None for dense. `form`: GGML format quantised to; 0: the blocks are a file's."""
        self.inputs, self.in_blocks = linear.shape[1], blocks is not None or form != DENSE
        self._weights: Stored | None = None
        self._blocks: Blocks | None = None
        self._round, self._bias = round, None if linear.bias is None else linear.bias.floats()
        if form == DENSE:
            self._weights = linear.weight()
            return
        name = next(name for name in _MADE_HERE if FORMATS[name].kind == form)
        self._blocks = blocks or encoded(library, linear.weight().floats(), name)

    def __call__(self, x: Floats) -> Floats:
        x = rounded(x) if self.in_blocks else x
        count = len(self._weights.values) if self._weights else len(self._blocks.rows)  # type: ignore[union-attr]
        made = np.concatenate([x @ self._part(at).T for at in range(0, count, _ROWS)], axis=-1)
        return self._round(made if self._bias is None else made + self._bias)

    def _part(self, at: int) -> Floats:
        if self._weights is not None:
            return Stored(self._weights.dtype, self._weights.values[at : at + _ROWS]).floats()
        assert self._blocks is not None
        return decoded(Blocks(self._blocks.format, self._blocks.rows[at : at + _ROWS]), self.inputs)


class Reference:
    """A model in float32, layer by layer. `configured`: see NativeModel."""

    def __init__(
        self, weights: FamilyWeights, dtype: str, packing: Packing, library: object, configured: int = 0
    ) -> None:
        self.weights, self.config, self._dtype = weights, weights.config, dtype
        self._packing, self._library, self._configured = packing, library, configured
        self._names = norms_of(self.config)
        self.round = rounding(dtype)

    def layer(self, index: int) -> Mapping[str, Product]:
        return {name: self._product(index, name) for name in MATRICES}

    def head(self, embedding: Stored) -> Product:
        config, stored = self.config, self._packing.stored
        if config.tie_word_embeddings:
            made = Linear((config.vocab_size, config.hidden_size), lambda: embedding)
        else:
            made = linear(self.weights, HEAD, self._dtype)
        return Product(made, stored.head() if stored else None, self._packing.head, self._library, self.round)

    def _product(self, index: int, name: str) -> Product:
        stored = self._packing.stored
        own = linear(self.weights, matrix_name(index, name), self._dtype, name)
        blocks = stored.matrix(index, name) if stored else None
        return Product(own, blocks, self._packing.layers, self._library, self.round)

    def passed(self, index: int, matrices: Matrices, x: Floats) -> Floats:
        """The residual stream [tokens, hidden] after a layer."""
        added = matrices["o"](self._attention(index, matrices, self._normed(index, "before_attention", x)))
        x = self._joined(x, self._normed(index, "after_attention", added))
        inner = self._normed(index, "before_mlp", x)
        made = gated(matrices["gate"](inner), matrices["up"](inner), self.round, self.config.hidden_act)
        return self._joined(x, self._normed(index, "after_mlp", matrices["down"](made)))

    def embedded(self, rows: Stored) -> Floats:
        """The residual stream of rows of the embedding."""
        return self.round(rows.floats() * np.float32(embedding_scale(self.config, self._dtype)))

    def last(self, logits: Floats) -> Floats:
        """The model's logits from the output matrix's products."""
        cap = np.float32(self.config.logit_cap)
        made = self.round(logits * np.float32(self.config.logit_scale))
        return self.round(self.round(np.tanh(self.round(made / cap))) * cap) if cap else made

    def _joined(self, x: Floats, added: Floats) -> Floats:
        return self.round(x + self.round(added * np.float32(self.config.residual_scale)))

    def _attention(self, index: int, matrices: Matrices, x: Floats) -> Floats:
        """Attention [tokens, heads * head_dim], before matrix o."""
        config, rope = self.config, self.config.rope_of(index)
        q, k = (self._heads(index, name, matrices[name](x)) for name in "qk")
        if rope != NO_ROPE:
            kept = "float32" if config.wide_rope else self._dtype
            turns = rotary_tables(config.ropes[rope], config.head_dim, len(x), kept, self._configured)
            q, k = (self.round(turned(each, turns, rounding(kept))) for each in (q, k))
        v = split(matrices["v"](x), config.head_dim)
        return attended(q, k, v, self.round, config.attention_scale, config.attention_cap, config.window_of(index))

    def last_norm(self, x: Floats) -> Floats:
        return self._by(NORM, x)

    def _normed(self, index: int, place: str, x: Floats) -> Floats:
        name = self._names.get(place)
        return x if name is None else self._by(f"model.layers.{index}.{name}.weight", x)

    def _by(self, name: str, x: Floats) -> Floats:
        norms, weight, epsilon = self.config.norms, self._vector(name), self.config.rms_norm_eps
        if norms.kind == "layer":
            x = x - x.mean(-1, keepdims=True)
        elif not norms.rounds_once:
            return normed(x, weight, epsilon, self.round)
        bias = self._vector(name.removesuffix("weight") + "bias") if norms.kind == "layer" else 0
        return self.round(normed(x, weight + np.float32(norms.offset), epsilon, rounding("float32")) + bias)

    def _vector(self, name: str) -> Floats:
        return self.weights.stored(name).to(self._dtype).floats()

    def _heads(self, index: int, name: str, x: Floats) -> Floats:
        """Queries or keys [heads, tokens, head_dim] of x [tokens, heads * head_dim], normed if the model does."""
        by_row = self.config.norms.heads == "row"
        found = split(self._normed(index, f"{name}_norm", x) if by_row else x, self.config.head_dim)
        return found if by_row else self._normed(index, f"{name}_norm", found)


def attended(
    q: Floats, k: Floats, v: Floats, round: Round, scale: float | None = None, cap: float = 0.0, window: int = 0
) -> Floats:
    """Causal attention [tokens, heads * head_dim] of q, k and v [heads, tokens, head_dim]."""
    groups = len(q) // len(k)
    k, v = np.repeat(k, groups, 0), np.repeat(v, groups, 0)
    scores = round(round(q @ k.swapaxes(1, 2)) * np.float32(q.shape[-1] ** -0.5 if scale is None else scale))
    scores = round(np.tanh(scores / np.float32(cap)) * np.float32(cap)) if cap else scores
    behind = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    scores = np.where((behind >= 0) & (behind < (window or len(behind))), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    made = round(round(weights / weights.sum(-1, keepdims=True)) @ v)
    return made.swapaxes(0, 1).reshape(q.shape[1], -1)


def split(x: Floats, head_dim: int) -> Floats:
    return x.reshape(len(x), -1, head_dim).swapaxes(0, 1)


def turned(x: Floats, turns: tuple[Floats, Floats], round: Round) -> Floats:
    """Rotates x [.., tokens, head_dim] by `turns`, each [tokens, values that turn / 2]."""
    (cosines, sines), half = turns, turns[0].shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    along, across = ((round(first * by), round(second * by)) for by in (cosines, sines))
    return round(np.concatenate([along[0] - across[1], along[1] + across[0], x[..., 2 * half :]], -1))


def normed(x: Floats, weight: Floats, epsilon: float, round: Round) -> Floats:
    return round(round(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(epsilon))) * weight)


def gated(gate: Floats, up: Floats, round: Round, activation: str = "silu") -> Floats:
    if activation == "gelu":
        tails = np.vectorize(math.erfc, otypes=[np.float32])
        return round(round(gate * tails(gate * np.float32(-(0.5**0.5))) / 2) * up)
    by_tanh = activation == "gelu_pytorch_tanh"
    power = np.float32(-((8 / math.pi) ** 0.5)) * (gate + np.float32(0.044715) * gate**3) if by_tanh else -gate
    with np.errstate(over="ignore"):  # of a large negative number: the quotient is 0
        return round(round(gate / (1 + np.exp(power))) * up)


def rounding(dtype: str) -> Round:
    """Rounds float32 to the numbers of `dtype`."""
    return (lambda x: x) if dtype == "float32" else (lambda x: of_floats(x).to(dtype).floats())


def side_by_side(names: Sequence[str], outputs: Sequence[Floats]) -> Floats:
    """Products of matrices packed together, in the order of NativeModel.product."""
    if "gate" not in names:
        return np.concatenate(outputs, 1)
    parts = [np.pad(each, ((0, 0), (0, -each.shape[1] % _LANES))).reshape(len(each), -1, _LANES) for each in outputs]
    return np.stack(parts, 2).reshape(len(outputs[0]), -1)


def rounded(x: Floats) -> Floats:
    """Activations float32 [.., inputs] to 8 bits and back, as in activations.h."""
    inputs = x.shape[-1]
    groups = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -inputs % GROUP)]).reshape(*x.shape[:-1], -1, GROUP)
    most = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = np.rint(groups * np.where(most > 0, np.float32(127) / most, np.float32(0)))
    made: Floats = (numbers * (most / np.float32(127))).reshape(*x.shape[:-1], -1)[..., :inputs]
    return made


def chance_inputs(generator: np.random.Generator, inputs: int, dtype: str) -> Stored:
    """Two random rows of inputs in `dtype`."""
    return of_floats(generator.standard_normal((2, inputs), dtype=np.float32)).to(dtype)


def columns(made: Floats, wanted: NDArray[np.int32] | None) -> Floats:
    return made if wanted is None else made[:, wanted]
