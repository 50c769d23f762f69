"""GGUF files: parts of split ones, formats that are repacked, ends of sequences, and what is refused by name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tandem.checkpoints import gguf_header
from tandem.checkpoints.family_configs import UnsupportedFamily
from tandem.checkpoints.family_weights import GgufWeights, check_complete
from tandem.checkpoints.generation_config import all_end_ids
from tandem.checkpoints.gguf_blocks import REPACKED, StoredWeights, repacked
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_sizes, find, weights_revision
from tests.gguf_files import write_gguf

HIDDEN, LAYERS = 32, 2
PARTS = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
TOKENS = [f"t{place}" for place in range(40)]


def tensors(more: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (40, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        names = {**{f"attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}}
        names |= {"ffn_gate": (64, HIDDEN), "ffn_up": (64, HIDDEN), "ffn_down": (HIDDEN, 64)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in names.items()}
        shapes |= {f"blk.{layer}.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
    shapes |= dict.fromkeys(more, (HIDDEN,))
    chance = np.random.default_rng(5)
    return {name: chance.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    file: Path,
    content: dict[str, np.ndarray],
    split: tuple[int, int, int] | None = None,
    kind: str = "llama",
    **more: Any,
) -> Path:
    """`split`: the part, the parts, and the tensors of all. `more`: keys, with __ for a dot."""
    values: dict[str, Any] = {}
    if split is None or not split[0]:
        said = {"context_length": 64, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": 64}
        values = {f"{kind}.{name}": value for name, value in (said | {"attention.head_count": 4}).items()}
        values |= {
            f"{kind}.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.tokens": more.pop("tokens", TOKENS),
        }
        if "types" in more:
            values["tokenizer.ggml.token_type"] = more.pop("types")
    values |= {name.replace("__", "."): value for name, value in more.items()}
    for name, value in zip(("no", "count", "tensors.count"), split or (), strict=False):
        sort = gguf.GGUFValueType.INT32 if "." in name else gguf.GGUFValueType.UINT16
        values[f"split.{name}"] = (value, sort)
    return write_gguf(file, kind, values, content)


def split(folder: Path, **second: Any) -> Path:
    """A model in two parts. `second`: what the second part says of itself instead."""
    whole = list(tensors().items())
    said = {"number": 1, "count": 2, "total": len(whole)} | second
    write(folder / PARTS[0], dict(whole[:9]), (0, 2, len(whole)))
    write(folder / PARTS[1], dict(whole[9:]), (said["number"], said["count"], said["total"]))
    return folder / PARTS[0]


def test_a_split_model_is_the_whole_one_from_its_first_part_or_its_folder(tmp_path: Path) -> None:
    first = split(tmp_path)
    whole = GgufWeights(write(tmp_path.with_suffix(".gguf"), tensors()))
    assert find(str(first)) == find(str(tmp_path)) == Checkpoint("m", str(tmp_path), PARTS[0])
    check_sizes(find(str(first)))
    weights = GgufWeights(first)
    check_complete(weights)
    assert weights.config == whole.config and set(weights.blocks.names()) == set(tensors())
    for name in tensors():
        assert np.array_equal(weights.blocks.stored(name).floats(), whole.blocks.stored(name).floats())
    before = weights_revision(find(str(first)))
    with (tmp_path / PARTS[1]).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert weights_revision(find(str(first))) != before


@pytest.mark.parametrize(("second", "why"), [({"number": 0}, "split.no 0"), ({"count": 3}, "split.count 3")])
def test_a_part_that_says_that_it_is_another_is_refused(tmp_path: Path, second: dict[str, int], why: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{PARTS[1]}: .*{why}.* part 1 of 2"):
        GgufWeights(split(tmp_path, **second))


def test_a_missing_part_and_one_that_is_not_the_first_are_named(tmp_path: Path) -> None:
    first = split(tmp_path)
    with pytest.raises(CheckpointError, match=rf"load it from its first part, {PARTS[0]}$"):
        find(str(tmp_path / PARTS[1]))
    (tmp_path / PARTS[1]).unlink()
    for name in (first, tmp_path):
        with pytest.raises(CheckpointError, match=rf"{PARTS[1]}: missing, and {PARTS[0]} is the first of 2 parts$"):
            find(str(name))


@pytest.mark.parametrize("name", REPACKED)
def test_repacked_formats_keep_every_number_to_the_bit(name: str) -> None:
    """What gguf makes of both is the same, for random bytes and scales."""
    form, chance = REPACKED[name], np.random.default_rng(3)
    rows = chance.integers(0, 256, (64, form.bytes), dtype=np.uint8)
    scale = slice(108, 110) if name == "q3_k" else slice(0, 2)
    rows[:, scale] = chance.uniform(-1, 1, (64, 1)).astype(np.float16).view(np.uint8)
    rows = rows.reshape(16, -1)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType(form.kind))
    made = gguf.dequantize(repacked(rows, name), gguf.GGMLQuantizationType[form.into.upper()])
    assert np.array_equal(made, expected) and np.unique(expected).size > 100


def test_the_ends_of_a_gguf_are_its_ids_and_the_tokens_that_llama_cpp_knows(tmp_path: Path) -> None:
    """`</s>` as a word, as Gemma has it, is no end; src/llama-vocab.cpp lists the texts."""
    tokens = [*TOKENS[:-4], "<|endoftext|>", "<|im_end|>", "</s>", "<end>"]
    ids = {"tokenizer__ggml__eos_token_id": 36, "tokenizer__ggml__eot_token_id": 3, "tokenizer__ggml__eom_token_id": 5}
    for kind, ends in ((4, (36, 3, 5, 37)), (3, (36, 3, 5, 37, 38))):
        types = [1] * 38 + [kind, 1]
        file = write(tmp_path / f"{kind}.gguf", tensors(), tokens=tokens, types=types, **ids)
        assert GgufWeights(file).config.eos == ends


def test_the_ends_of_a_folder_are_those_of_both_files(tmp_path: Path) -> None:
    folder = Checkpoint("m", str(tmp_path))
    assert all_end_ids(folder, (2,)) == (2,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert all_end_ids(folder, (2,)) == (8, 9, 7)


@pytest.mark.parametrize("key", ["planted", "rope.scaling.planted"])
def test_a_key_that_nothing_reads_is_refused_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedFamily, match=re.escape(f"llama.{key}: 3")):
        GgufWeights(write(tmp_path / "m.gguf", tensors(), **{f"llama__{key.replace('.', '__')}": 3}))


@pytest.mark.parametrize(
    "name", ["planted.weight", "blk.1.planted.weight", "blk.1.attn_q.bias", "blk.0.attn_q_norm.weight"]
)
def test_a_tensor_that_nothing_reads_is_refused_by_name(tmp_path: Path, name: str) -> None:
    weights = GgufWeights(write(tmp_path / "m.gguf", tensors((name,))))
    with pytest.raises(CheckpointError, match=f"weights have {re.escape(name)}, which"):
        check_complete(weights)


def test_a_bias_is_taken_in_every_layer_or_missed_by_name(tmp_path: Path) -> None:
    biases = tuple(f"blk.{layer}.attn_q.bias" for layer in range(LAYERS))
    weights = GgufWeights(write(tmp_path / "m.gguf", tensors(biases)))
    check_complete(weights)
    assert weights.config.biases == {"q"}
    with pytest.raises(CheckpointError, match=r"lack model\.layers\.1\.self_attn\.q_proj\.bias"):
        check_complete(GgufWeights(write(tmp_path / "n.gguf", tensors(biases[:1]))))


def test_experts_and_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFamily, match=r"llama with experts \(llama\.expert_count\)"):
        GgufWeights(write(tmp_path / "m.gguf", tensors(), llama__expert_count=8))
    with pytest.raises(UnsupportedFamily, match="architecture mamba"):
        GgufWeights(write(tmp_path / "n.gguf", tensors(), kind="mamba"))


def test_repacked_matrices_run_as_stored(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q5_0
    data = gguf.quants.quantize(tensors()["token_embd.weight"], kind)
    write_gguf(tmp_path / "m.gguf", "llama", {}, {"output.weight": (data, kind)})
    stored = StoredWeights(tmp_path / "m.gguf")
    head = stored.head()
    assert stored.runs_as_stored and stored.formats() == ("q5_0",) and head is not None and head.format == "q8_0"
    assert np.array_equal(
        gguf.dequantize(head.rows, gguf.GGMLQuantizationType.Q8_0), stored.stored("output.weight").floats()
    )


def test_a_header_is_read_once_until_the_file_changes_and_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, key = write(tmp_path / "m.gguf", tensors()), b"llama.block_count"
    first, time, content = gguf_header.header_of(file), file.stat().st_mtime_ns, bytearray(file.read_bytes())
    assert gguf_header.header_of(file) is first
    content[content.index(key) + len(key) + 4] = 1
    file.write_bytes(content)
    os.utime(file, ns=(time, time))  # its size, place and time stay
    assert (first.values[key.decode()], gguf_header.header_of(file).values[key.decode()]) == (LAYERS, 1)
    monkeypatch.setattr(gguf_header, "_MOST_HEADER", len(first.content) - 1)
    with pytest.raises(CheckpointError, match="bytes before the tensors"):
        GgufWeights(write(tmp_path / "n.gguf", tensors()))
