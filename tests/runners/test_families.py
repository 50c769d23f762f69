"""Every family of the table that module code serves decodes as transformers does; the rest is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem.checkpoints.locate import CheckpointError, find
from tandem.runners.families import served
from tandem.runners.load_runner import Execution, Shape, load_runner
from tandem.runners.protocol import PrefillRow
from tandem.runners.torch import kernels
from tandem.runners.torch.torch_runner import TorchRunner
from tandem.speculation.types import SamplingParams
from tests.daily import daily
from tests.rows import verify_row
from tests.runners.compiled import compiler, on_graphs

POSITIONS, WINDOW, ORIGINAL = 96, 8, 48
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "no_rope_layers": [1, 1, 1, 0],
    "query_pre_attn_scalar": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 500.0},
    "vaultgemma": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 500.0},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "phi": {"partial_rotary_factor": 0.5},
    "phimoe": {"sliding_window": None},  # with a window, which its attention does not get, it is refused
    "qwen2_moe": {"use_sliding_window": False},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
}
SERVED = served()
PROMPTS = [[5, 9, 100, 7, 33, 9, 100], [(37 * i) % 199 + 3 for i in range(41)], [8, 150]]
LONG = [0.6 + 0.9 * i for i in range(1, 5)]


def made(kind: str, folder: Path, **said: Any) -> Any:
    """A tiny random model of a family as transformers loads it, written to `folder`."""
    config = CONFIG_MAPPING[kind]
    known = {each.name for each in fields(config)} | {"rope_scaling", *config.attribute_map}
    sizes = {name: value for name, value in {**SIZES, **OTHERS.get(kind, {}), **said}.items() if name in known}
    module = AutoModelForCausalLM.from_config(config(**sizes))
    chance = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = parameter.data * (parameter.ndim == 1) + 0.25 * torch.randn(parameter.shape, generator=chance)
    module.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def load(folder: Path, length: int = POSITIONS, compile: str = "off", device: str = "cpu", **execution: Any) -> Any:
    shape = Shape(slots=len(PROMPTS), max_length=length, max_draft=3, chunk=16)
    runner = load_runner(find(str(folder)), Execution(device, "float32", compile=compile, **execution), shape)
    runner.warm_up()
    return runner


def decoded(runner: Any, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens after each prompt: all in one batch, prefilled in chunks, with bad drafts."""
    texts = [list(prompt) for prompt in prompts]
    for slot, text in enumerate(texts):
        for at in range(0, len(text) - 1, 16):
            runner.prefill([PrefillRow(slot, at, tuple(text[at : min(at + 16, len(text) - 1)]))])
    while any(len(text) < len(prompt) + count for text, prompt in zip(texts, prompts, strict=True)):
        short = [slot for slot, text in enumerate(texts) if len(text) < len(prompts[slot]) + count]
        rows = [verify_row(slot, len(texts[slot]) - 1, texts[slot][-1], (8, 8), SamplingParams()) for slot in short]
        for slot, verdict in zip(short, runner.verify(rows), strict=True):
            texts[slot] += verdict.token_ids
    return [text[len(prompt) :][:count] for text, prompt in zip(texts, prompts, strict=True)]


def at_home(module: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", daily(SERVED, 1, SERVED.index("gpt_oss")))
def test_a_family_decodes_as_transformers_does_beyond_its_windows(kind: str, tmp_path: Path) -> None:
    module = made(kind, tmp_path)
    expected = [at_home(module, prompt, 40) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 3, "a model that repeats a token shows nothing"
    runner = load(tmp_path)
    assert decoded(runner, PROMPTS, 40) == expected
    assert decoded(runner, PROMPTS[1:2], 40) == expected[1:2]
    experts = isinstance(runner, TorchRunner) and runner.model.experts
    assert runner.shapes.bit_exact != experts


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
@pytest.mark.thorough
def test_graphs_have_windows_sinks_and_caps_too(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(kind, tmp_path)
    on_graphs(monkeypatch, lambda: compiler(traced=True))
    runner = load(tmp_path, compile="inductor", device="cuda")
    assert decoded(runner, PROMPTS, 30) == [at_home(module, prompt, 30) for prompt in PROMPTS]


ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": LONG},
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": ORIGINAL},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL}}
    | {"max_position_embeddings": ORIGINAL},
}


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_those_of_the_sequence_length_for_every_prompt(
    rope: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = made("phi3" if rope == "longrope" else "llama", tmp_path, sliding_window=None, **ROPES[rope])
    within = load(tmp_path, ORIGINAL)
    assert decoded(within, PROMPTS[::2], 30) == [at_home(module, prompt, 30) for prompt in PROMPTS[::2]]
    caplog.set_level("INFO", "tandem.engine")
    runner = load(tmp_path, POSITIONS)
    assert runner.shapes.bit_exact and (
        rope == "yarn" or f"{rope} has the frequencies of sequence_length 96" in caplog.text
    )
    for prompt, tokens in zip(PROMPTS, decoded(runner, PROMPTS, POSITIONS - 41), strict=True):
        text = [*prompt, *tokens]
        whole = torch.tensor([[*text, *[3] * (POSITIONS - len(text))]])  # what follows only sets the length
        with torch.inference_mode():
            best = module(whole).logits[0].argmax(-1).tolist()
        assert best[len(prompt) - 1 : len(text) - 1] == tokens


def refused(change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object], folder: Path) -> str:
    """What a llama is refused with after a change of its configuration and weights."""
    made("llama", folder)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as refusal:
        load(folder)
    assert "\n" not in str(refusal.value) and str(folder) in str(refusal.value)
    return str(refusal.value)


BIAS, GATE = "model.layers.1.self_attn.o_proj.bias", "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config, weights: weights.update({BIAS: torch.ones(48)}), f"no place for the weights {BIAS}"),
        (lambda config, weights: weights.pop(GATE), f"weights lack {GATE}"),
        (lambda config, weights: weights.update({GATE: torch.ones(95, 48)}), f"the shape of the weights {GATE}"),
        (lambda config, weights: config.update(sink_size=4), "config.json: sink_size: module code of llama"),
        (lambda config, weights: config.update(model_type="deepseek_v3"), "nothing here serves deepseek_v3: keys and"),
        (lambda config, weights: config.update(model_type="nonesuch"), "nonesuch is not among the families"),
        (lambda config, weights: config.pop("model_type"), "model_type"),
    ],
)
def test_what_nothing_uses_is_refused_by_name(change: Any, said: str, tmp_path: Path) -> None:
    assert said in refused(change, tmp_path)


def test_fields_that_shape_nothing_are_let_through(tmp_path: Path) -> None:
    made("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    neutral = {
        "sink_size": None,
        "use_mrope": False,
        "torch_dtype": "float32",
        "_name_or_path": "x",
        "temperature": 0.6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | neutral))
    load(tmp_path)


def test_an_argument_that_attention_loses_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made("gpt_oss", tmp_path)
    whole = kernels.slot_attention
    for lost in ("s_aux", "sliding_window"):
        monkeypatch.setattr(
            kernels, "slot_attention", lambda *given, lost=lost, **named: whole(*given, **{**named, lost: None})
        )
        with pytest.raises(CheckpointError, match="gpt_oss does not compute on a slot cache what it computes alone"):
            load(tmp_path)
    monkeypatch.setattr(kernels, "slot_attention", lambda *given, **named: whole(*given, **named, bias=1))
    with pytest.raises(CheckpointError, match="attention of GptOssAttention takes bias, which slots do not serve"):
        load(tmp_path)


def test_an_untested_family_is_tried_if_the_operator_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = made("llama", tmp_path)
    monkeypatch.setattr("tandem.runners.families.served", lambda: ())
    with pytest.raises(CheckpointError, match="--untested_model tries it"):
        load(tmp_path)
    assert decoded(load(tmp_path, untested_model=True), PROMPTS[:1], 8) == [at_home(module, PROMPTS[0], 8)]


def test_a_family_whose_layers_name_their_cache_otherwise_hands_out_hidden_states(tmp_path: Path) -> None:
    made("gpt_neox", tmp_path)
    runner = load(tmp_path)
    features = runner.hand_out((1, 2))
    runner.prefill([PrefillRow(1, 0, (5, 6, 7))])
    assert features.values[1, :3].any(-1).all()


@pytest.mark.parametrize("how", ["sharded", "pickled"])
def test_weights_in_several_files_and_in_pytorchs_load(how: str, tmp_path: Path) -> None:
    module, file = made("llama", tmp_path), tmp_path / "model.safetensors"
    file.unlink()
    if how == "sharded":
        module.save_pretrained(tmp_path, max_shard_size="40KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    else:
        torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    assert decoded(load(tmp_path, compile="auto"), PROMPTS[:1], 8) == [at_home(module, PROMPTS[0], 8)]


def test_a_weight_file_that_is_damaged_or_lacks_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    state = {
        name: tensor.clone() for name, tensor in made("llama", tmp_path).state_dict().items()
    }  # the file is mapped
    file.write_bytes(b"\x00" * 64)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path, compile="auto")
    file.unlink()
    del state["model.layers.1.mlp.up_proj.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        load(tmp_path, compile="auto")
