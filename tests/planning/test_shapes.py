"""Dimensions and parameter counts from config.json files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.workshops.planning.shapes import read_shape
from tests.planning.support import model

PUBLISHED = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.1-405B-FP8": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-0.6B": 596_049_920,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_are_counted_as_published(name: str, count: int):
    assert read_shape(model(name), "target_model").parameters == count


def test_a_tiny_models_parameters_are_those_that_transformers_makes(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for kind, config in (
        ("qwen2", transformers.Qwen2Config),
        ("qwen3", transformers.Qwen3Config),
        ("llama", transformers.LlamaConfig),
    ):
        made = config(
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16 if kind == "qwen3" else 8,
            vocab_size=100,
            tie_word_embeddings=False,
            attention_bias=kind == "llama",
        )
        made.save_pretrained(tmp_path / kind)
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(made)
        shape = read_shape(str(tmp_path / kind), "model")
        assert shape.parameters == sum(p.numel() for p in module.parameters()), kind


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size: None is not a whole number above 0"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers: '80' is not a whole number above 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: 0 is not"),
        ({"num_key_value_heads": 7}, "num_key_value_heads: 7 do not divide 32 heads"),
        ({"model_type": "mixtral"}, "model_type: 'mixtral' is not one of llama, mistral, qwen2, qwen3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method: 'awq' is not fbgemm_fp8 or fp8"),
        ({"quantization_config": "fp8"}, "quant_method: 'fp8' is not"),
    ],
)
def test_a_missing_or_unfitting_key_is_named(tmp_path: Path, change: dict[str, object], says: str):
    config = {**json.loads(Path(model("Llama-3.1-8B"), "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ValueError) as raised:
        read_shape(str(tmp_path), "draft_model")
    assert str(raised.value).startswith(f"draft_model: {tmp_path / 'config.json'}: ")
    assert says in str(raised.value)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"target_model: .*config\.json is not"):
        read_shape(str(tmp_path), "target_model")


def test_what_a_checkpoint_keeps_unconverted_is_read():
    converted = read_shape(model("Llama-3.1-405B-FP8"), "m")
    assert converted.eight_bit("model.layers.10.mlp.gate_proj")
    assert not converted.eight_bit("model.layers.0.mlp.gate_proj")
    assert not converted.eight_bit("model.layers.10.self_attn.q_proj")
