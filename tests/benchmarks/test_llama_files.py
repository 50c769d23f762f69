"""The files that llama.cpp runs: the target's weights in other formats, and a draft of transformers' layout."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.llama_files import read, write_draft, write_target

HIDDEN, HEADS, WORDS = 64, 2, ["a", "b", "c", "<end>"]


@pytest.fixture
def target(tmp_path):
    """A target with an embedding in Q8_0, a matrix in Q4_1, a norm, and the values of its dense weights."""
    random = np.random.default_rng(0)
    dense = {name: random.normal(size=(4, HIDDEN)).astype(np.float32) for name in ("token_embd", "output")}
    writer = gguf.GGUFWriter(tmp_path / "target.gguf", "llama")
    writer.add_file_type(3)
    writer.add_block_count(1)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_eos_token_id(3)
    for (name, values), kind in zip(dense.items(), ("Q8_0", "Q4_1"), strict=True):
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, stored), raw_dtype=stored)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read(tmp_path / "target.gguf")


def values_of(reader):
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}


def kinds_of(reader):
    return {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


def test_a_target_in_another_format_has_the_same_values_once_rounded(target, tmp_path):
    before = values_of(target)
    for file_type in ("BF16", "Q8_0"):
        write_target(target, file_type, tmp_path / f"{file_type}.gguf")
        written = read(tmp_path / f"{file_type}.gguf")
        matrices = {"token_embd.weight": file_type, "output.weight": file_type}
        assert kinds_of(written) == {**matrices, "output_norm.weight": "F32"}
        for name, values in values_of(written).items():
            assert values.shape == before[name].shape
            assert np.allclose(values, before[name], rtol=2**-8, atol=0.02)
        assert written.fields["llama.rope.freq_base"].contents() == 100000.0
        assert written.fields["tokenizer.ggml.tokens"].contents() == WORDS
    embeddings = [next(t.data for t in r.tensors if t.name == "token_embd.weight") for r in (target, written)]
    assert np.array_equal(*embeddings)  # in Q8_0 before


@pytest.fixture
def draft(tmp_path):
    """A Llama folder, and its weights."""
    random = np.random.default_rng(1)
    shapes = {
        "model.embed_tokens.weight": (4, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.q_proj.bias": (HIDDEN,),
        "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        "model.layers.0.self_attn.v_proj.bias": (HIDDEN // 2,),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, 96),
    }
    weights = {name: random.normal(size=shape).astype(np.float16) for name, shape in shapes.items()}
    folder = tmp_path / "draft"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama", "vocab_size": 4, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 96, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder, weights, config


def test_a_draft_is_written_with_its_own_shape_and_the_targets_tokenizer(draft, target, tmp_path):
    folder, weights, _ = draft
    write_draft(folder, target, "F16", tmp_path / "draft.gguf")
    written = read(tmp_path / "draft.gguf")
    said = {name: field.contents() for name, field in written.fields.items()}
    assert (said["llama.block_count"], said["llama.attention.head_count_kv"]) == (1, 1)
    assert (said["llama.rope.dimension_count"], said["llama.rope.freq_base"]) == (32, 1e6)
    assert (said["tokenizer.ggml.tokens"], said["tokenizer.ggml.eos_token_id"]) == (WORDS, 3)
    values = values_of(written)
    assert np.array_equal(values["blk.0.ffn_down.weight"], weights["model.layers.0.mlp.down_proj.weight"])
    assert np.array_equal(values["blk.0.attn_v.bias"], weights["model.layers.0.self_attn.v_proj.bias"])


def test_the_members_of_a_rotary_pair_are_neighbours_in_each_head(draft, target, tmp_path):
    folder, weights, _ = draft
    write_draft(folder, target, "F16", tmp_path / "draft.gguf")
    values = values_of(read(tmp_path / "draft.gguf"))
    ours = {name.split("self_attn.")[1]: v for name, v in weights.items() if "_proj" in name and "self_attn" in name}
    head = HIDDEN // HEADS
    names = (("q_proj.weight", "attn_q.weight"), ("q_proj.bias", "attn_q.bias"), ("k_proj.weight", "attn_k.weight"))
    for name, theirs in names:
        found = values[f"blk.0.{theirs}"]
        for row, value in enumerate(ours[name]):
            begin, at = row // head * head, row % head
            pair, member = at % (head // 2), at // (head // 2)
            assert np.array_equal(found[begin + 2 * pair + member], value), (name, row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "only a Llama"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "only a Llama"),
        ({"vocab_size": 5}, "5 tokens, and the target has 4"),
    ],
)
def test_a_draft_that_would_run_wrongly_is_refused(draft, target, tmp_path, change, message):
    folder, _, config = draft
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        write_draft(folder, target, "F16", tmp_path / "draft.gguf")
