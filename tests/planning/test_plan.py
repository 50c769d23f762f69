"""What fits, against the cases that AWS documents; shapes as published; the command's errors and output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.host.instances import instance_named
from tandem.workshops.planning.plan import (
    GUARD,
    Pair,
    PlanConfig,
    Process,
    core_heads,
    disk_bytes,
    pair_of,
    weight_bytes,
)
from tandem.workshops.planning.shapes import DecoderShape, read_shape
from tests.planning.support import model, planned

SEED_405B = dict(batch=1, length=12800, drafts=6, backend="nxdi")


def shape(name: str) -> DecoderShape:
    return read_shape(model(name), "model")


def fitting(plan: Pair, kind: str = "target") -> list[int]:
    return [process.degree for process in plan.processes() if process.kind == kind and process.fits]


def process(plan: Pair, kind: str, degree: int) -> Process:
    return next(each for each in plan.processes() if (each.kind, each.degree) == (kind, degree))


# --- bytes of one core ---


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-0.6B"])
def test_one_core_holds_the_whole_model(name: str):
    whole = shape(name)
    assert weight_bytes(whole, 1, nxdi=False) == 2 * whole.parameters
    untied = whole.config.vocab_size * whole.config.hidden_size if whole.config.tie_word_embeddings else 0
    assert weight_bytes(whole, 1, nxdi=True) == 2 * (whole.parameters + untied)


@pytest.mark.parametrize(
    ("name", "degree", "heads"),
    [
        ("Llama-3.1-8B", 4, (8, 2)),
        ("Llama-3.1-70B", 16, (4, 1)),  # 8 KV heads repeated to 16
        ("Llama-3.2-1B", 64, (1, 1)),  # 32 heads padded to 64
        ("Llama-3.1-8B", 12, (3, 3)),  # 12 is no multiple of 8 KV heads: every query head gets its own
    ],
)
def test_nxd_inference_pads_query_heads_and_repeats_kv_heads(name: str, degree: int, heads: tuple[int, int]):
    assert core_heads(shape(name), degree, nxdi=True) == heads


def test_eight_bits_are_counted_where_the_checkpoint_has_them():
    whole = shape("Llama-3.1-405B-FP8")
    plain, eight = (weight_bytes(replace(whole, kept=kept), 1, nxdi=True) for kept in (None, whole.kept))
    hidden, intermediate = whole.config.hidden_size, whole.config.intermediate_size
    matrices = 124 * 3 * hidden * intermediate  # the MLPs of all layers but the first and the last
    scales = 124 * 4 * (2 * intermediate + hidden)
    assert plain - eight == matrices - scales


def test_a_core_is_full_at_what_is_usable_of_it() -> None:
    assert Process("target", 1, weights=7, kv=2, buffers=1, usable=10).fits
    assert not Process("target", 1, weights=7, kv=3, buffers=1, usable=10).fits
    assert not Process("target", 3, "32 heads are not divisible by 3").fits
    (one,) = planned("trn1.2xlarge", "Llama-3.2-1B", degree=1).processes()
    assert one.usable == int(16 * 2**30 * 23.5 / 25.77)


@pytest.mark.parametrize(
    ("nxdi", "chunk", "positions"),
    [(False, 2, 5 * (100 + 8)), (False, 64, 5 * (100 + 64)), (True, 2, 4 * (100 + GUARD))],
)
def test_the_cache_has_a_spare_row_and_room_behind_the_last_position(nxdi: bool, chunk: int, positions: int) -> None:
    sizes = {"batch": 4, "length": 100, "drafts": 7, "chunk": chunk, "backend": "nxdi" if nxdi else "torch"}
    token = 2 * 16 * 8 * 64 * 2  # keys and values, layers, heads, dimensions, bytes
    assert process(planned("trn2.3xlarge", "Llama-3.2-1B", **sizes), "target", 1).kv == positions * token


# --- the documented cases ---


def test_the_seeds_pair_fits_fused_on_a_trn1_2xlarge_and_in_int8_on_a_core_each():
    pair = dict(batch=2, length=128, drafts=4)
    plan = planned("trn1.2xlarge", "Llama-3.1-8B", "Llama-3.2-1B", **pair)
    assert (fitting(plan), fitting(plan, "fused"), fitting(plan, "draft")) == ([2], [2], [1, 2])
    small = planned("trn1.2xlarge", "Llama-3.1-8B", "Llama-3.2-1B", **pair, quantization="int8")
    core = process(small, "target", 1)
    assert core.fits and 8e9 < core.weights < 9.2e9  # the tables stay in two bytes


def test_a_degree_that_does_not_divide_the_model_is_refused() -> None:
    assert process(planned("trn2.48xlarge", "Qwen3-32B"), "target", 16).refused == "8 KV heads are not divisible by 16"
    assert process(planned("inf2.48xlarge", "Llama-3.1-8B"), "target", 24).refused == "32 heads are not divisible by 24"


def test_llama_405b_in_bfloat16_needs_all_64_cores_and_in_fp8_32():
    assert fitting(planned("trn2.48xlarge", "Llama-3.1-405B", **SEED_405B)) == [64]
    fp8 = planned("trn2.48xlarge", "Llama-3.1-405B-FP8", "Llama-3.2-1B", **SEED_405B)
    assert fitting(fp8) == [32, 64] and 64 in fitting(fp8, "fused")


def test_disk_is_counted_from_the_shapes() -> None:
    fp8 = disk_bytes(planned("trn2.48xlarge", "Llama-3.1-405B-FP8", "Llama-3.2-1B", **SEED_405B, degree=64))
    assert fp8["checkpoints"] == pytest.approx(490e9, rel=0.01)
    assert fp8["a converted copy"] == pytest.approx(487e9, rel=0.01)
    assert fp8["the cores' shares"] > 2 * fp8["a converted copy"]
    assert set(disk_bytes(planned("trn2.3xlarge", "Llama-3.1-8B"))) == {"checkpoints", "system and graphs (assumed)"}


# --- refusals and the command ---


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "toy"}, "backend: 'toy' cannot be planned for"),
        ({"dtype": "int4"}, "dtype: 'int4' is not one of auto, bfloat16"),
        ({"batch": 0}, "batch: 0 is below 1"),
        ({"length": 999999}, "sequence_length: 999999 is above Llama-3.1-8B's max_position_embeddings 131072"),
        ({"degree": 3}, "tp_degree: 3 is not one of 1, 2, 4 on a trn2.3xlarge"),
        ({"lnc": 4}, "lnc: 4 is not one of 2, 1 on trn2.3xlarge"),
        ({"quantization": "int8"}, "quantization: int8 is NxD Inference's; add --backend nxdi"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_field(settings: dict[str, object], says: str):
    with pytest.raises(ValueError, match=says):
        planned("trn2.3xlarge", "Llama-3.1-8B", **settings).processes()


def test_an_instance_is_named_or_made_of_chips():
    assert instance_named("trn3:4").cores(2) == 16 and instance_named("trn2.48xlarge").cores(2) == 64


def run(*arguments: str) -> int:
    return main.main(["--role", "plan", *arguments])


def test_the_command_prints_a_plan_and_says_that_it_is_one(capsys: pytest.CaptureFixture[str]):
    pair = ["--target_model", model("Llama-3.1-8B"), "--draft_model", model("Llama-3.2-1B")]
    assert run(*pair, "--instance", "trn1.2xlarge", "--sequence_length", "128", "--batch", "2") == 0
    out = capsys.readouterr().out
    assert "not a measurement" in out and "Disk: 512 GB: " in out
    assert [line.split()[:2] for line in out.splitlines() if line.endswith("  fits")] == [
        ["target", "2"],
        ["draft", "1"],
        ["draft", "2"],
        ["fused", "2"],
    ]
    assert run(*pair, "--instance", "trn1.2xlarge", "--sequence_length", "128", "--batch", "2", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] == "plan, not a measurement" and answer["instance"]["cores"] == 2
    assert sum(each["fits"] for each in answer["processes"]) == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "instance: give --instance, one of trn1.2xlarge"),
        (("--instance", "trn1.2xlarge"), "target_model: give --target_model DIR"),
        (("--instance", "p5.48xlarge", "--target_model", "DIR"), ", nor FAMILY:CHIPS"),
        (("--instance", "trn1.2xlarge", "--target_model", "/nowhere"), "/nowhere/config.json is not there"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
):
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_head_is_no_model_of_a_plan(tmp_path: Path) -> None:
    own = json.loads(Path(model("Llama-3.1-8B"), "config.json").read_text())
    head = own | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(head))
    with pytest.raises(ValueError, match=r"draft_model: .*: an EAGLE head; a plan counts whole models alone"):
        pair_of(PlanConfig("trn2.3xlarge", model("Llama-3.1-8B"), str(tmp_path)), instance_named("trn2.3xlarge"))


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
