"""Checkpoints of llama2.c: read, converted, and held against a forward pass written after run.c."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.llama2c import Llama2cShape, Weights, read_llama2c, read_pieces, write_checkpoint

SHAPE = Llama2cShape(dim=24, hidden_dim=40, layers=3, heads=6, kv_heads=2, vocab_size=50, positions=16, tied=True)
APART = Llama2cShape(dim=16, hidden_dim=24, layers=2, heads=2, kv_heads=2, vocab_size=30, positions=16, tied=False)


def file_of(shape: Llama2cShape, seed: int = 0) -> bytes:
    """A random checkpoint as export.py writes it; its rotary tables are those of run.c."""
    rng = np.random.default_rng(seed)
    header = (shape.dim, shape.hidden_dim, shape.layers, shape.heads, shape.kv_heads)
    parts = [np.array([*header, shape.vocab_size if shape.tied else -shape.vocab_size, shape.positions], "<i4")]
    for name, size in shape.arrays():
        array = rng.normal(1.0 if name.endswith("norm") else 0.0, 0.3, size)
        if name.startswith("rope"):
            angles = np.arange(size[0])[:, None] * 10000.0 ** (-2 * np.arange(size[1]) / shape.head_size)
            array = np.cos(angles) if name == "rope_cos" else np.sin(angles)
        parts.append(array.astype("<f4"))
    return b"".join(part.tobytes() for part in parts)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean() + 1e-5)


def rotated(vector: np.ndarray, position: int, head_size: int) -> np.ndarray:
    """Neighbours are turned together, each pair of a head at its own speed: the loop of run.c."""
    out = vector.copy()
    for i in range(0, len(vector), 2):
        angle = position * 10000.0 ** (-(i % head_size) / head_size)
        a, b = vector[i], vector[i + 1]
        out[i], out[i + 1] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return out


def reference(shape: Llama2cShape, w: Weights, tokens: list[int]) -> np.ndarray:
    """Logits [tokens, vocabulary], one token at a time, as llama2.c computes them."""
    size, keys, values, logits = shape.head_size, {}, {}, []
    for position, token in enumerate(tokens):
        x = w["embedding"][token].astype(np.float64)
        for layer in range(shape.layers):
            h = norm(x, w["attention_norm"][layer])
            q = rotated(w["wq"][layer] @ h, position, size)
            keys[layer, position] = rotated(w["wk"][layer] @ h, position, size)
            values[layer, position] = w["wv"][layer] @ h
            mixed = np.zeros(shape.dim)
            for head in range(shape.heads):
                shared = head // (shape.heads // shape.kv_heads) * size
                query = q[head * size : (head + 1) * size]
                scores = [query @ keys[layer, t][shared : shared + size] / size**0.5 for t in range(position + 1)]
                weights = np.exp(scores - np.max(scores))
                weights /= weights.sum()
                mixed[head * size : (head + 1) * size] = sum(
                    weight * values[layer, t][shared : shared + size] for t, weight in enumerate(weights)
                )
            x = x + w["wo"][layer] @ mixed
            h = norm(x, w["ffn_norm"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        logits.append((w["embedding"] if shape.tied else w["head"]) @ norm(x, w["final_norm"]))
    return np.array(logits)


@pytest.mark.parametrize("shape", [SHAPE, APART], ids=["grouped heads, tied", "a head of its own"])
def test_the_converted_model_says_what_llama2c_says_beyond_its_positions_too(
    shape: Llama2cShape, tmp_path: Path
) -> None:
    found, weights, rest = read_llama2c(file_of(shape) + b"vocabulary")
    assert (found, rest) == (shape, b"vocabulary")
    write_checkpoint(shape, weights, 64, (1, 2), tmp_path)
    module, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and module.config.max_position_embeddings == 64
    tokens = np.random.default_rng(1).integers(shape.vocab_size, size=2 * shape.positions).tolist()
    with torch.inference_mode():
        logits = module(input_ids=torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(logits, reference(shape, weights, tokens), rtol=1e-3, atol=1e-4)


def test_a_file_that_is_not_what_its_header_says_is_refused() -> None:
    whole = file_of(SHAPE)
    with pytest.raises(ValueError, match="less than its header"):
        read_llama2c(whole[:20])
    with pytest.raises(ValueError, match="ends within rope_sin"):
        read_llama2c(whole[:-4])
    with pytest.raises(ValueError, match=r"not a llama2\.c checkpoint: dim: 0 is below 1"):
        read_llama2c(bytes(28))
    broken = np.frombuffer(whole, "<i4").copy()
    broken[4] = 5
    with pytest.raises(ValueError, match=r"kv_heads: 6 heads do not share 5"):
        read_llama2c(broken.tobytes())


@pytest.mark.parametrize("longest", [b"", b"\x05\0\0\0"], ids=["as first written", "with the longest length"])
def test_the_vocabulary_behind_it_is_read(longest: bytes) -> None:
    pieces = ["<unk>", "\n<s>\n", " the", "\u6536", ""]
    content = longest
    for piece in pieces:
        content += np.float32(-1).tobytes() + np.int32(len(piece.encode())).tobytes() + piece.encode()
    assert read_pieces(content, len(pieces)) == pieces
    for wrong in (content[:-1], content + b"\0"):
        with pytest.raises(ValueError, match=r"not a llama2\.c vocabulary of 5 pieces"):
            read_pieces(wrong, len(pieces))
