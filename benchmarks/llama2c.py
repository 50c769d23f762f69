"""Converts checkpoints of llama2.c (github.com/karpathy/llama2.c, its first format) to Hugging Face folders.

A file is seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len), then float32 weights. A
negative vocab_size means that the head has separate weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROPE_THETA = 10_000.0
NORM_EPS = 1e-5
_HEADER = 7 * 4

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Llama2cShape:
    """The header of a file. `tied`: the head is the embedding."""

    dim: int
    hidden_dim: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    positions: int
    tied: bool

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "layers", "heads", "kv_heads", "vocab_size", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.dim % (2 * self.heads):
            raise ValueError(f"heads: {self.heads} heads of even size do not make a dim of {self.dim}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.heads} heads do not share {self.kv_heads}")

    @property
    def head_size(self) -> int:
        return self.dim // self.heads

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Returns names and shapes of the weights in the file's order; linear layers are [layers, out, in]."""
        layers, dim, hidden, kv = self.layers, self.dim, self.hidden_dim, self.kv_heads * self.head_size
        yield "embedding", (self.vocab_size, dim)
        yield "attention_norm", (layers, dim)
        yield "wq", (layers, dim, dim)
        yield "wk", (layers, kv, dim)
        yield "wv", (layers, kv, dim)
        yield "wo", (layers, dim, dim)
        yield "ffn_norm", (layers, dim)
        yield "w1", (layers, hidden, dim)
        yield "w2", (layers, dim, hidden)
        yield "w3", (layers, hidden, dim)
        yield "final_norm", (dim,)
        yield "rope_cos", (self.positions, self.head_size // 2)
        yield "rope_sin", (self.positions, self.head_size // 2)
        if not self.tied:
            yield "head", (self.vocab_size, dim)


def read_llama2c(content: bytes) -> tuple[Llama2cShape, Weights, bytes]:
    """Reads the shape, the weights (float32) and the trailing bytes. Raises ValueError for an invalid file."""
    if len(content) < _HEADER:
        raise ValueError(f"not a llama2.c checkpoint: {len(content)} bytes are less than its header")
    dim, hidden, layers, heads, kv_heads, vocab, positions = np.frombuffer(content[:_HEADER], "<i4").tolist()
    try:
        shape = Llama2cShape(dim, hidden, layers, heads, kv_heads, abs(vocab), positions, tied=vocab > 0)
    except ValueError as error:
        raise ValueError(f"not a llama2.c checkpoint: {error}") from None
    weights: Weights = {}
    at = _HEADER
    for name, size in shape.arrays():
        count = int(np.prod(size, dtype=np.int64))
        if at + 4 * count > len(content):
            raise ValueError(f"not a llama2.c checkpoint: it ends within {name}")
        weights[name] = np.frombuffer(content, "<f4", count, at).reshape(size)
        at += 4 * count
    return shape, weights, content[at:]


def read_pieces(content: bytes, vocab_size: int) -> list[str]:
    """Reads the pieces of a llama2.c tokenizer.bin in the order of their ids.

    Each is a score (float32), a length (int32) and so many bytes; later versions begin with the longest length.
    """
    for start in (0, 4):
        pieces = _pieces(content, start, vocab_size)
        if pieces is not None:
            return pieces
    raise ValueError(f"not a llama2.c vocabulary of {vocab_size} pieces")


def _pieces(content: bytes, start: int, count: int) -> list[str] | None:
    pieces, at = [], start
    for _ in range(count):
        if at + 8 > len(content):
            return None
        length = int(np.frombuffer(content, "<i4", 1, at + 4)[0])
        at += 8
        if length < 0 or at + length > len(content):
            return None
        pieces.append(content[at : at + length].decode("utf-8", "replace"))
        at += length
    return pieces if at == len(content) else None


def write_checkpoint(shape: Llama2cShape, weights: Weights, positions: int, ends: tuple[int, int], folder: Path) -> Any:
    """Writes a Hugging Face Llama in float32 and returns it. `ends` are (first token, last token).

    `positions` may be above what the model was trained at: rotary positions are computed, not stored.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=positions,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=shape.tied,
        bos_token_id=ends[0],
        eos_token_id=ends[1],
    )
    module: Any = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(array.copy()) for name, array in _renamed(shape, weights).items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if shape.tied else set()):
        raise ValueError(f"weights do not fit: {sorted(missing)[:3]} missing, {sorted(unexpected)[:3]} unknown")
    module.save_pretrained(folder)
    return module.eval()


def _renamed(shape: Llama2cShape, weights: Weights) -> Weights:
    state: Weights = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["final_norm"]}
    if not shape.tied:
        state["lm_head.weight"] = weights["head"]
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        state[f"{layer}.input_layernorm.weight"] = weights["attention_norm"][i]
        state[f"{layer}.post_attention_layernorm.weight"] = weights["ffn_norm"][i]
        state[f"{layer}.self_attn.q_proj.weight"] = halves(weights["wq"][i], shape.heads)
        state[f"{layer}.self_attn.k_proj.weight"] = halves(weights["wk"][i], shape.kv_heads)
        state[f"{layer}.self_attn.v_proj.weight"] = weights["wv"][i]
        state[f"{layer}.self_attn.o_proj.weight"] = weights["wo"][i]
        state[f"{layer}.mlp.gate_proj.weight"] = weights["w1"][i]
        state[f"{layer}.mlp.down_proj.weight"] = weights["w2"][i]
        state[f"{layer}.mlp.up_proj.weight"] = weights["w3"][i]
    return state


def halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorders the rows of a query or key layer [out, in]: llama2.c rotates neighbors, transformers a head's halves."""
    out, size = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, size).swapaxes(1, 2).reshape(out, size)
