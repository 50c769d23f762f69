"""Checkpoints that lie about their sizes are refused from their headers: nothing is made, no library is asked."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.gguf_cache import convert
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_sizes, embedded_draft, find

WIDTH, LAYERS, FORWARD, VOCABULARY = 8, 2, 16, 32
SAID = {
    "llama.block_count": LAYERS,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": FORWARD,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.context_length": 1 << 20,  # takes no weights
}
TENSORS = {"token_embd.weight": (WIDTH, VOCABULARY)} | {
    f"blk.{i}.{name}.weight": (WIDTH, FORWARD) for i in range(LAYERS) for name in ("ffn_up", "ffn_down", "attn_q")
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(said: dict[str, int], tensors: dict[str, tuple[int, ...]] = TENSORS, **counts: int) -> bytes:
    """A GGUF file with these values and zeros for weights; `counts` lie about how many there are."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, counts.get("many", len(tensors)), counts.get("values", len(said) + 1))
    tokens = struct.pack("<IIQ", 9, 8, counts.get("tokens", VOCABULARY)) + b"".join(
        text("t") for _ in range(VOCABULARY)
    )
    values = b"".join(text(key) + struct.pack("<IQ", 10, value) for key, value in said.items())
    table = b"".join(
        text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0) for name, shape in tensors.items()
    )
    return head + values + text("tokenizer.ggml.tokens") + tokens + table + bytes(4 * 3 * LAYERS * WIDTH * FORWARD * 4)


def checkpoint(folder: Path, content: bytes) -> Checkpoint:
    (folder / "m.gguf").write_bytes(content)
    return find(str(folder / "m.gguf"))


def test_a_file_that_tells_the_truth_is_let_through(tmp_path: Path) -> None:
    check_sizes(checkpoint(tmp_path, gguf(SAID)))
    check_sizes(find(None))
    check_sizes(find(embedded_draft()))


LIES: dict[str, dict[str, Any]] = {
    "layers": {"said": SAID | {"llama.block_count": 2**31}},
    "one layer more than there are tensors of": {"said": SAID | {"llama.block_count": LAYERS + 1}},
    "a width": {"said": SAID | {"llama.embedding_length": 2**40}},
    "a feed-forward width": {"said": SAID | {"llama.feed_forward_length": 2**31}},
    "heads": {"said": SAID | {"llama.attention.head_count": 2**31}},
    "experts": {"said": SAID | {"llama.expert_count": 2**31}},
    "tensors": {"said": SAID, "many": 2**60},
    "values": {"said": SAID, "values": 2**60},
    "tokens": {"said": SAID, "tokens": 2**60},
    "a tensor's shape": {"said": SAID, "tensors_": {**TENSORS, "x.weight": (2**31, 2**31)}},
    "a tensor's dimensions": {"said": SAID, "tensors_": {**TENSORS, "x.weight": (1,) * 5}},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_gguf_that_lies_is_refused_before_anything_is_made_of_it(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    asked = dict(LIES[lie])
    content = gguf(asked.pop("said"), asked.pop("tensors_", TENSORS), **asked)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(CheckpointError) as refused:
        convert(checkpoint(tmp_path, content), tmp_path / "out")
    assert str(refused.value).startswith(str(tmp_path / "m.gguf")) and "\n" not in str(refused.value)


@pytest.mark.parametrize("length", [5, 20, 40, 200, 400])
def test_a_gguf_that_was_cut_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"beyond its end|are claimed in"):
        check_sizes(checkpoint(tmp_path, gguf(SAID)[:length]))


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim"]
)
def test_a_configuration_that_lies_is_refused(name: str, tmp_path: Path) -> None:
    true = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 32}
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000))
    (tmp_path / "config.json").write_text(json.dumps(true))
    check_sizes(find(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(true | {name: 2**31}))
    with pytest.raises(CheckpointError, match="and the weights have at most 80000 parameters"):
        check_sizes(find(str(tmp_path)))
