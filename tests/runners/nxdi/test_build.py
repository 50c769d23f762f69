"""What is compiled: fields passed through, names checked, and what NxDI would break refused before it compiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from tandem.checkpoints.locate import CheckpointError
from tandem.runners.load_runner import Shape
from tandem_nxdi.backend import BACKEND
from tandem_nxdi.nxdi_settings import NxdiSettings, read_neuron_config
from tandem_nxdi.shapes import Kind, plan_build
from tests.runners.nxdi import simulated
from tests.runners.nxdi.runners import Bench, application, bench  # noqa: F401

TARGET, DRAFT, FUSED, EAGLE3 = Kind.WINDOW, Kind.PLAIN, Kind.FUSED, "an EAGLE-3 head in one graph with its target"
KERNELS = {"attn_kernel_enabled": True, "qkv_kernel_enabled": True, "mlp_kernel_enabled": True}


def plan(
    asked: Any = TARGET, tp_degree: int = 1, eagle: bool = False, draft: Any = None, slots: int = 4, **fields: Any
) -> Any:
    kind, eagle3 = (FUSED, True) if asked == EAGLE3 else (asked, False)
    settings = NxdiSettings(tp_degree, fields, draft or {}, None, eagle=eagle or eagle3)
    return plan_build(kind, Shape(slots, 512, 4), settings, eagle3=eagle3)


@pytest.mark.parametrize(
    "fields",
    [
        {"fused_qkv": True, "sequence_parallel_enabled": True, "logical_nc_config": 2},
        KERNELS | {"attn_block_tkg_nki_kernel_enabled": True, "attn_block_tkg_nki_kernel_cascaded_attention": True},
        {"quantized": True, "quantized_checkpoints_path": "q", "quantization_type": "per_channel_symmetric"},
        {"on_device_sampling_config": {"do_sample": False, "top_k": 1, "top_p": 1.0}, "output_logits": True},
        {"weights_to_skip_layout_optimization": [".*"], "cc_pipeline_tiling_factor": 1, "apply_seq_ids_mask": True},
        {"moe_tp_degree": 2, "blockwise_matmul_config": {"block_size": 512}},
    ],
)
def test_any_field_of_neuron_config_is_passed_through(fields: dict[str, Any]) -> None:
    given = plan(**fields).neuron
    assert {name: given[name] for name in fields} == fields


def test_what_a_role_compiles_follows_from_our_flags() -> None:
    target, draft, fused = (plan(asked, tp_degree=32).neuron for asked in (TARGET, DRAFT, FUSED))
    for given in (target, draft, fused):
        assert (given["batch_size"], given["ctx_batch_size"], given["is_continuous_batching"]) == (4, 1, True)
        assert (given["tp_degree"], given["padding_side"]) == (32, "right")
    assert (target["speculation_length"], draft["speculation_length"], fused["speculation_length"]) == (5, 0, 5)
    assert (target["seq_len"], target["max_context_length"]) == (512, 512)
    assert fused["enable_fused_speculation"] and not target["enable_fused_speculation"]
    assert fused["seq_len"] == 640  # 512 + 5, in tiles of 128
    assert "torch_dtype" not in target  # the checkpoint's own
    own = plan_build(TARGET, Shape(1, 512, 4), NxdiSettings(), "float32").neuron
    assert own["torch_dtype"] == "float32" and not own["is_continuous_batching"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fused_qkvs": True}, "has no field 'fused_qkvs'; did you mean fused_qkv?"),
        ({"trace_tokengen_model": True}, "has no field 'trace_tokengen_model'"),
        ({"on_device_sampling_config": {"topk": 1}}, "on_device_sampling_config: .*'topk'; did you mean top_k?"),
        ({"kv_quant_config": {"dtype": 1}}, "kv_quant_config: .*'dtype'; did you mean quant_dtype?"),
        ({"kv_quant_config": True}, "kv_quant_config is True, not an object"),
    ],
)
def test_a_name_that_nxdi_does_not_know_is_an_error_that_names_the_nearest(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch_size": 8}, "batch_size is 8, but --batch makes it 4"),
        ({"tp_degree": 8}, "tp_degree is 8, but --tp_degree makes it 1"),
        ({"speculation_length": 7}, "speculation_length is 7, but --speculation_length makes it 5"),
        ({"ctx_batch_size": 2}, "ctx_batch_size is 2, but --backend makes it 1"),
        ({"is_eagle3": True}, "is_eagle3 is True, but --eagle makes it not given"),
        ({"seq_len": 4}, "sequence_length: 4 has no room for steps of 5"),
        ({"max_length": 600}, "seq_len 512, max_length and n_positions must be one number"),
        ({"max_context_length": 600}, "max_context_length 600 is above seq_len 512"),
        ({"token_generation_buckets": [128, 256], "seq_len": 512}, "largest of token_generation_buckets is 256"),
        ({"token_generation_buckets": [512], "enable_bucketing": False}, "only read with enable_bucketing"),
    ],
)
def test_one_number_has_one_source(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_build(TARGET, Shape(4, 512, 4), NxdiSettings(neuron_config=fields))
    assert plan(batch_size=4, speculation_length=5).neuron["batch_size"] == 4  # saying it again is fine


QUANTIZED = {"quantized": True, "quantized_checkpoints_path": "q"}
SAMPLING = "on_device_sampling_config"


@pytest.mark.parametrize(
    ("asked", "fields", "reason"),
    [
        (TARGET, {"async_mode": True}, "no token generation model"),
        (FUSED, {"async_mode": True}, "With --batch 1"),
        *((FUSED, {SAMPLING: one}, "asked for its argmax alone") for one in ({"top_k": 5}, {"temperature": 0.7})),
        (TARGET, {SAMPLING: {"do_sample": True}}, "no draw could be repeated"),
        (TARGET, {"pa_num_blocks": 8}, "sends no block tables"),
        (TARGET, {"num_medusa_heads": 4}, "Medusa heads"),
        (TARGET, {"max_new_tokens": 64}, "anew for every sub-model"),
        (TARGET, {"enable_eagle_draft_input_norm": True}, "with --eagle alone"),
        (TARGET, {"draft_model_modules_to_not_convert": ["lm_head"]}, "this role loads one model"),
        (TARGET, {"quantization_dtype": "int8"}, "they are read with quantized: true"),
        (TARGET, QUANTIZED | {"quantization_dtype": "f8e4m3x"}, "is not one of"),
        (TARGET, QUANTIZED | {"quantization_type": "per_mood"}, "is not one of"),
        (TARGET, {"output_logits": True}, "list of two"),
        (FUSED, {"output_logits": True}, "alias map"),
        (FUSED, {"lora_config": {"max_loras": 1}}, "empty tensors"),
        (TARGET, {"lora_config": {"max_loras": 2}}, "requests name those of --adapters"),
        (TARGET, {"lora_config": {"dynamic_multi_lora": True}}, "requests name those of --adapters"),
        (TARGET, {"lora_config": {"enable_base_model_only": True}}, "requests name those of --adapters"),
        (TARGET, {"context_encoding_buckets": [5, 512]}, "traced as a verification"),
        (TARGET, {"token_generation_batches": [2, 4]}, "any speculation"),
        (TARGET, {"is_prefix_caching": True}, "slot mappings"),
        (EAGLE3, {"sequence_parallel_enabled": False}, "an EAGLE-3 head needs both"),
        (EAGLE3, {"windowed_context_encoding_size": 128, "slots": 1}, "an EAGLE-3 head reads three"),
        (FUSED, {"token_tree_config": {"0": ["1"]}}, "flat"),
        (TARGET, {"on_cpu": True}, "CPU mode"),
        (TARGET, {"padding_side": "left"}, "rolled back"),
        (TARGET, {"allow_input_truncation": True}, "cut off"),
        (TARGET, {"attn_block_tkg_nki_kernel_enabled": True}, "qkv_kernel_enabled"),
        (TARGET, {"k_cache_transposed": True, "flash_decoding_enabled": True}, "flash_decoding_enabled"),
        (TARGET, {"quantized": True}, "quantized_checkpoints_path is missing"),
        (TARGET, {"quantized_checkpoints_path": "q"}, "only read with quantized"),
        (TARGET, {"rmsnorm_quantize_kernel_enabled": True}, "quantized_mlp_kernel_enabled"),
        (TARGET, {"activation_quantization_type": "dynamic", "mlp_kernel_enabled": True}, "MLP kernels"),
        (TARGET, {"attention_dp_degree": 2}, "split among ranks"),
        (TARGET, {"pp_degree": 2}, "pipeline"),
        (TARGET, {"windowed_context_encoding_size": 128}, "line"),
        (TARGET, {"tensor_capture_config": {"modules_to_capture": ["x"]}}, "debugging"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_nxdi_breaks_is_refused_with_the_reason(asked: Any, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be used here: .*{reason}"):
        plan(asked, **fields)


def test_prompts_that_cores_share_are_a_multiple_of_them() -> None:
    with pytest.raises(ValueError, match="divides prompts among tp_degree cores"):
        plan(TARGET, tp_degree=8, sequence_parallel_enabled=True, context_encoding_buckets=[130, 512])
    assert plan(TARGET, tp_degree=8, sequence_parallel_enabled=True, context_encoding_buckets=[128, 512]).neuron


def test_draws_among_one_token_are_compiled_as_the_argmax_that_they_are() -> None:
    """As the seed's Llama-3.1-405B command asks for them: --do-sample --top-k 1."""
    built = plan(FUSED, on_device_sampling_config={"do_sample": True, "top_k": 1})
    assert built.neuron["on_device_sampling_config"] == {"do_sample": False, "top_k": 1} and built.tokens_only


def test_a_quantized_cache_gets_both_of_its_fields() -> None:
    assert plan(kv_cache_quant=True).neuron["kv_quant_config"] == {}
    assert plan(kv_quant_config={"direct_cast": True}).neuron["kv_cache_quant"] is True


def test_buckets_alone_turn_bucketing_on_and_say_how_long_a_line_is() -> None:
    buckets = [1024, 2048, 4096, 10240, 12288]
    fields = {"token_generation_buckets": buckets, "context_encoding_buckets": buckets}
    build = plan_build(FUSED, Shape(1, 12288, 6), NxdiSettings(64, fields))
    assert build.neuron["enable_bucketing"] and build.neuron["seq_len"] == 12288
    assert build.max_length == 12288 - 7  # the last round's drafts need room
    assert build.layout.chunks == (1023, 2047, 4095, 10239, 12288)


def test_a_fused_drafts_own_fields_are_kept_apart() -> None:
    quantized = {"quantized": True, "quantized_checkpoints_path": "q"}
    assert plan(FUSED, **quantized, modules_to_not_convert=["o_proj"]).draft["modules_to_not_convert"] is None
    build = plan(FUSED, tp_degree=8, draft={"quantized": False, "tp_degree": 2}, **quantized)
    assert (build.draft["quantized"], build.draft["tp_degree"], build.neuron["tp_degree"]) == (False, 2, 8)
    assert "quantized_checkpoints_path" not in build.draft
    lists = {"draft_model_modules_to_not_convert": ["lm_head"], "modules_to_not_convert": ["o_proj"]}
    assert plan(FUSED, **quantized, **lists).draft["modules_to_not_convert"] == ["lm_head"]
    with pytest.raises(ValueError, match="tp_degree 3 does not divide the target's 8"):
        plan(FUSED, tp_degree=8, draft={"tp_degree": 3})
    with pytest.raises(ValueError, match="seq_len is the target's"):
        plan(FUSED, draft={"seq_len": 128})
    with pytest.raises(ValueError, match="as-declared"):
        plan(FUSED, draft={"torch_dtype": "float32"})
    for wrong in ({"draft": {"fused_qkv": True}}, {"eagle": True}):
        with pytest.raises(ValueError, match="only --role fused_target"):
            plan(TARGET, **wrong)


def test_the_draft_of_a_fused_graph_is_configured_as_nxdis_own_demo_does(bench: Bench) -> None:  # noqa: F811
    bench.pair(model_type="qwen3")
    fused = application().config.fused_spec_config
    draft = fused.draft_config.neuron_config
    assert (draft.speculation_length, draft.enable_fused_speculation, draft.is_eagle_draft) == (0, False, False)
    assert fused.worker_cls == "NeuronLlamaModel" and fused.draft_model_cls is simulated.NeuronQwen3ForCausalLM
    bench.pair(eagle=True)
    fused = application().config.fused_spec_config
    draft = fused.draft_config.neuron_config
    assert (draft.speculation_length, draft.enable_fused_speculation, draft.is_eagle_draft) == (5, False, True)
    assert fused.draft_model_cls is None
    assert application().neuron_config.enable_eagle_speculation


def test_weights_are_quantized_once_before_the_first_compilation(bench: Bench) -> None:  # noqa: F811
    path = bench.folder / "quantized"
    given = {"neuron_config": {"quantized": True, "quantized_checkpoints_path": str(path)}}
    bench.target(**given)
    assert path.is_dir()
    path.rmdir()
    bench.target(**given)  # compiled already
    assert not path.exists()


def test_neuron_config_is_read_from_a_file_or_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "neuron.json"
    file.write_text(json.dumps({"fused_qkv": True}))
    assert read_neuron_config(str(file)) == read_neuron_config(' {"fused_qkv": true}') == {"fused_qkv": True}
    assert read_neuron_config(None) == {}
    for wrong, said in (
        ("{", "not valid JSON"),
        ("nowhere.json", "nor a file that can be read"),
        ("{}x", "not valid JSON"),
    ):
        with pytest.raises(ValueError, match=f"^neuron_config: .*{said}"):
            read_neuron_config(wrong)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="holds list, not an object"):
        read_neuron_config(str(file))


def test_a_hub_id_is_found_in_hugging_faces_cache_or_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--Qwen--Qwen3-32B"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123abcd")
    (cached / "snapshots" / "0123abcd").mkdir(parents=True)
    (cached / "snapshots" / "0123abcd" / "config.json").write_text("{}")
    found = BACKEND.find("Qwen/Qwen3-32B")
    assert (found.name, Path(found.folder)) == ("Qwen/Qwen3-32B", cached / "snapshots" / "0123abcd")
    with pytest.raises(CheckpointError, match=r"Qwen/Qwen3-0.6B: neither a folder nor to be had from the hub: \w+"):
        BACKEND.find("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert"}, "no text model 'bert'"),
        ({"max_position_embeddings": 32}, "64 is above the model's 32 positions"),
        ({"sliding_window": 16}, "sliding window of 16"),
    ],
)
def test_a_checkpoint_that_nxdi_cannot_run_is_refused(bench: Bench, config: dict[str, Any], said: str) -> None:  # noqa: F811
    file = bench.model() / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ValueError, match=said):
        bench.target(Shape(2, 64, 3))
    assert simulated.COMPILED == []


def test_names_of_a_quantized_cache_become_what_nxd_takes(bench: Bench, monkeypatch) -> None:  # noqa: F811
    import sys

    given = {"k_quant_method": "per_tensor_symmetric", "quant_dtype": "float8_e4m3fn", "direct_cast": True}
    bench.target(neuron_config={"kv_quant_config": given})
    read = application().neuron_config.given["kv_quant_config"].given
    assert read["k_quant_method"].value == "per_tensor_symmetric" and read["quant_dtype"] is torch.float8_e4m3fn
    older = sys.modules["neuronx_distributed.quantization.quantization_config"]
    monkeypatch.delattr(older, "KVQuantizationConfig")
    bench.target(neuron_config={"kv_cache_quant": True})
    assert "kv_quant_config" not in application().neuron_config.given
    with pytest.raises(ValueError, match="kv_quant_config is not in this NxD Inference"):
        bench.target(neuron_config={"kv_quant_config": given})
