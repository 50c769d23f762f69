"""EAGLE-3 heads: what the target hands out, what the head makes of it, and that no bit of the target changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tandem.checkpoints.head_config import HeadConfig, default_layers, is_head, read_head_config
from tandem.checkpoints.locate import CheckpointError
from tandem.engine.batcher import Batcher
from tandem.engine.generator import Generator
from tandem.engine.generators import fused_generator
from tandem.engine.load_models import Loaded, load, load_pair
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.engine.prefix_cache import PrefixSharing, PrefixTree, share_prefixes
from tandem.runners.capabilities import PAGE
from tandem.runners.eagle.module import EagleHead, write_head
from tandem.runners.load_runner import BACKEND, Execution, Shape
from tandem.runners.startup import Startup
from tandem.speculation.types import Chunk, GenerationRequest, Rule, SamplingParams, SpeculationStats
from tests.daily import daily
from tests.rows import fill, propose_row, verify_row
from tests.runners.modules import read_head, torch_features

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=11)
CONFIG = HeadConfig(64, 4, 2, 16, 96, 258, 200, 64, layers=(1, 1, 2))
HOW = ("native", "off")


pytestmark = pytest.mark.usefixtures("one_thread")


def a_head(config: HeadConfig = CONFIG, seed: int = 0) -> EagleHead:
    """A head that was never trained, for tokens 40 and on."""
    torch.manual_seed(seed)
    head = EagleHead(config)
    head.narrow_to(torch.arange(40, 40 + config.draft_vocab_size))
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data += 0.5 * torch.randn_like(parameter)
    return head.requires_grad_(False)


def models(target: Path, how: str, dtype: str, choice: DraftChoice, slots: int = 2) -> ModelConfig:
    execution = Execution("cpu", dtype, threads=1, compile=how)
    return ModelConfig(execution, Shape(slots, 96, 4, chunk=8), str(target), choice, default_k=4)


def with_pair(config: ModelConfig, use: Callable[[Loaded, Loaded], Any]) -> Any:
    async def test() -> Any:
        batcher = Batcher("test")
        try:
            pair, draft = await load_pair(config, batcher)
            assert draft is not None
            found = use(pair, draft)
            return await found if asyncio.iscoroutine(found) else found
        finally:
            await batcher.close()

    return asyncio.run(test())


async def said(generator: Generator, request: GenerationRequest) -> tuple[list[int], SpeculationStats]:
    tokens: list[int] = []
    stats = SpeculationStats()
    async for part in generator.generate(request, stats):
        tokens += part.token_ids if isinstance(part, Chunk) else ()
    return tokens, stats


def requests() -> list[GenerationRequest]:
    """Prompts of 1 token and more, greedy and sampled, one of them up to the sequence length."""
    return [
        GenerationRequest(token_ids=tuple(range(50, 50 + n)), sampling=s, max_new_tokens=m, ignore_end_of_sequence=True)
        for n, s, m in ((1, GREEDY, 30), (2, SAMPLED, 30), (23, GREEDY, 73), (9, replace(SAMPLED, seed=4), 12))
    ]


@pytest.mark.parametrize("how", daily(HOW, 0))
def test_a_prompt_found_among_prefixes_is_drafted_from_as_one_that_was_processed(
    target: Path, folder: Path, how: str
) -> None:
    """What is committed under rejection depends on what the head draws from, and that on every feature."""

    async def use(pair: Loaded, draft: Loaded) -> None:
        await share_prefixes([pair.engine, draft.engine], PrefixSharing("all", 4), lambda: "")
        generator = fused_generator(pair, draft, 4, DraftChoice("eagle", str(folder)))
        prompts = [tuple(range(start, start + 55)) for start in (60, 120)]
        asked = [
            GenerationRequest(
                token_ids=prompt, sampling=SAMPLED, max_new_tokens=20, rule=Rule.REJECTION, ignore_end_of_sequence=True
            )
            for prompt in prompts
        ]
        cold = [await said(generator, request) for request in asked]
        warm = [await said(generator, request) for request in asked]
        assert [stats.cached_prompt_tokens for _, stats in (*cold, *warm)] == [0, 0, 48, 48]
        for (tokens, stats), (again, counted) in zip(cold, warm, strict=True):
            assert again == tokens and counted.accepted_per_position == stats.accepted_per_position
        turns = [
            replace(request, token_ids=(*request.token_ids, *tokens, 7), max_new_tokens=12)
            for request, (tokens, _) in zip(asked, cold, strict=True)
        ]
        warm = [await said(generator, request) for request in turns]
        assert pair.engine.prefixes
        for (tokens, stats), request in zip(warm, turns, strict=True):
            await pair.engine.batcher.on_device(int)  # prefixes are inserted by now
            pair.engine.prefixes.tree = PrefixTree(pair.engine.prefixes.tree.count)
            again, counted = await said(generator, request)
            assert (stats.cached_prompt_tokens, counted.cached_prompt_tokens) == (64, 0), "most of the answer too"
            assert again == tokens and counted.accepted_per_position == stats.accepted_per_position

    with_pair(models(target, how, "float32", DraftChoice("eagle", str(folder))), use)


@contextlib.asynccontextmanager
async def alone(target: Path, how: str, dtype: str) -> AsyncIterator[Any]:
    """A target's runner."""
    batcher = Batcher("test")
    try:
        yield (await load(models(target, how, dtype, DraftChoice("ngram")), batcher)).runner
    finally:
        await batcher.close()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", HOW)
async def test_handing_out_features_changes_no_bit_of_the_targets_logits(target: Path, how: str, dtype: str) -> None:
    async with alone(target, how, dtype) as runner:
        before = logits_of(runner)
        page = runner.capabilities.pages.bytes
        features = torch_features(runner.hand_out((1, 1, 2)))
        assert page and runner.capabilities.pages.bytes == page + PAGE * 3 * 64 * features.values.element_size()
        assert all(torch.equal(a, b) for a, b in zip(before, logits_of(runner), strict=True))
        assert features.values[0, :13].abs().sum() > 0
        fill(runner, 0, range(60, 60 + PAGE))
        kept = features.values[0, :PAGE].clone()
        sender, receiver = runner.page_store(1), runner.page_store(1)
        sender.save(0, 0, [0])
        assert len(sender.read(0)) == runner.capabilities.pages.bytes
        receiver.write(0, sender.read(0))
        receiver.load(1, 0, [0])
        assert receiver.read(0) == sender.read(0) and torch.equal(features.values[1, :PAGE], kept)


def logits_of(runner: Any) -> list[torch.Tensor]:
    fill(runner, 0, range(60, 68))
    fill(runner, 1, range(90, 95))
    rows = [verify_row(0, 8, 70, (71, 72, 73, 74), GREEDY), verify_row(1, 5, 97, (98,), GREEDY)]
    return [torch.as_tensor(row).clone() for row in (*runner.verify_logits(rows), *runner.verify_logits(rows[:1]))]


@pytest.mark.parametrize("how", HOW)
async def test_features_are_the_targets_hidden_states_and_those_of_rejected_tokens_are_overwritten(
    target: Path, how: str
) -> None:
    tokens = [60, 61, 62, 63, 64, 99, 98]
    module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    caught: list[torch.Tensor] = []
    module.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.inference_mode():
        states = module(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[1], states[0], caught[0]], -1)[0]

    async with alone(target, how, "float32") as runner:
        features = torch_features(runner.hand_out((1, 0, 2)))
        fill(runner, 1, tokens[:4])
        runner.verify([verify_row(1, 4, tokens[4], (50, 51, 52), GREEDY)])
        assert not torch.allclose(features.values[1, 5], wanted[5], atol=1e-3)
        runner.verify([verify_row(1, 5, tokens[5], (tokens[6],), GREEDY)])
        torch.testing.assert_close(features.values[1, :7], wanted, rtol=1e-4, atol=1e-5)
        slots = torch.tensor([1])
        assert not features.at(slots, torch.tensor([[-1]])).any(), "a feature before the first token"
        features.values[1, 3, 0] = torch.nan
        assert features.at(slots, torch.tensor([[3]])).isfinite().all()


@pytest.mark.each_value
@pytest.mark.parametrize("norm_before", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_the_first_draft_token_follows_from_the_published_formula(
    target: Path, tmp_path: Path, how: str, norm_before: bool
) -> None:
    write_head(tmp_path, a_head(replace(CONFIG, norm_before_residual=norm_before), seed=7))
    tokens = [60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160]
    module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    def use(pair: Loaded, draft: Loaded) -> None:
        fill(pair.runner, 1, tokens[:10])
        fill(draft.runner, 1, tokens[:8])
        row = propose_row(1, 10, tuple(tokens[8:]), 3, GREEDY)
        (proposal,) = draft.runner.propose([row])
        expected = int(published(module, load_file(tmp_path / "model.safetensors"), tokens, norm_before).argmax()) + 40
        assert proposal.token_ids[0] == expected  # type: ignore[union-attr]
        again = draft.runner.propose([replace(row, slot=0, position=0, tail=(60,)), row])
        assert again[1].token_ids == proposal.token_ids  # type: ignore[union-attr]

    with_pair(models(target, how, "float32", DraftChoice("eagle", str(tmp_path))), use)


@torch.inference_mode()
def published(module: Any, head: dict[str, torch.Tensor], tokens: Sequence[int], norm_before: bool) -> torch.Tensor:
    """Logits of the token after `tokens` by the formula of EAGLE-3, from a head's file: nothing of ours computes it."""
    caught: list[torch.Tensor] = []
    handle = module.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    states = module(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    handle.remove()
    hidden = torch.cat([states[1], states[1], caught[0]], -1)[0] @ head["fc.weight"].T
    embeds = module.model.embed_tokens.weight[torch.tensor(tokens[1:])]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (64,), head[name], 1e-5)

    normed = norm(hidden, "midlayer.hidden_norm.weight")
    x = torch.cat([norm(embeds, "midlayer.input_layernorm.weight"), normed], -1)
    residual = (normed if norm_before else hidden)[-1:]
    q, k, v = ((x @ head[f"midlayer.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, 16)) for n in "qkv")
    q, k = turned(q), turned(k)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q[-1], k) / 4, -1)
    attended = torch.einsum("hn,nhd->hd", weights, v).flatten()[None]
    out = residual + attended @ head["midlayer.self_attn.o_proj.weight"].T
    y = norm(out, "midlayer.post_attention_layernorm.weight")
    gate, up, down = (head[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
    out = out + (F.silu(y @ gate) * (y @ up)) @ down
    return norm(out, "norm.weight")[0] @ head["lm_head.weight"].T


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [n, heads, 16]."""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :8], x[..., 8:]
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, layers=None, norm_before_residual=True, attention_bias=True),
        replace(CONFIG, rope={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    ],
)  # fmt: skip
def test_a_head_written_and_read_again_is_the_same(tmp_path: Path, config: HeadConfig) -> None:
    head, embedding = a_head(config).to(torch.bfloat16), torch.randn(258, 64)
    write_head(tmp_path, head, embedding)
    again, own = read_head(tmp_path)
    assert again.config == config and is_head(tmp_path)
    assert own is not None and torch.equal(own, embedding)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert again.state_dict()[name].dtype == tensor.dtype


def laid_out_like_specforge() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "silu", "hidden_size": 64,
        "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 2048, "model_type": "llama",
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.28.1", "use_cache": True,
        "vocab_size": 258, "draft_vocab_size": 200,
    }  # fmt: skip


def laid_out_like_speculators() -> dict[str, Any]:
    llama = laid_out_like_specforge()
    layer = {name: llama[name] for name in llama if name not in ("architectures", "draft_vocab_size")}
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 200,
        "has_no_defaults_at_init": False,
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
    }


@pytest.mark.parametrize(
    ("config", "layer", "extra"),
    [
        (laid_out_like_specforge(), "midlayer.", {}),
        (laid_out_like_speculators(), "layers.0.", {"embed_tokens.weight": torch.randn(258, 64)}),
    ],
)
def test_heads_laid_out_by_others_are_read(
    tmp_path: Path, config: dict[str, Any], layer: str, extra: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = a_head(replace(CONFIG, layers=None)).state_dict()
    theirs = {name.replace("midlayer.", layer): tensor.clone() for name, tensor in state.items()}
    theirs["d2t"] = theirs["d2t"].int()
    save_file({**theirs, **extra}, tmp_path / "model.safetensors")
    head, embedding = read_head(tmp_path)
    assert head.config == replace(CONFIG, layers=None)
    assert (embedding is None) == (not extra)
    assert all(torch.equal(head.state_dict()[name], tensor) for name, tensor in state.items())


def test_layers_are_counted_as_vllm_and_as_sglang_count_them(tmp_path: Path) -> None:
    def layers(**fields: Any) -> tuple[int, ...] | None:
        (tmp_path / "config.json").write_text(json.dumps(laid_out_like_specforge() | fields))
        return read_head_config(tmp_path).layers

    name = "eagle_aux_hidden_state_layer_ids"
    assert layers() is None
    assert layers(**{name: [2, 16, 29]}) == (2, 16, 29)
    assert layers(eagle_config={name: [1, 15, 28]}) == (2, 16, 29)
    assert layers(**{name: [2, 16, 29], "eagle_config": {name: [1, 15, 28]}}) == (2, 16, 29)
    assert default_layers(32) == (2, 16, 29) and default_layers(2) == (2, 1, 2)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2 is not supported, only 1"),
        ({"draft_vocab_size": 300}, "draft_vocab_size: 300 is above vocab_size 258"),
        ({"hidden_size": "64"}, "unsupported operand|hidden_size"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"\[1, 2\] are not 3 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1 head, which is not supported"),
        ({"intermediate_size": None}, "intermediate_size: None is not a whole number above 0"),
        ({"architectures": ["LlamaForCausalLM"]}, "not the configuration of an EAGLE-3 head"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(laid_out_like_specforge() | fields))
    with pytest.raises(CheckpointError, match=why):
        read_head_config(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path: Path, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    def refused(changed: dict[str, Any], why: str) -> None:
        kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=why):
            read_head(tmp_path)

    refused({"midlayer.hidden_norm.weight": None}, "the head lacks midlayer.hidden_norm.weight")
    refused({"midlayer.extra": torch.zeros(1)}, "the head has midlayer.extra")
    refused({"fc.weight": torch.zeros(64, 64)}, r"fc.weight is \[64, 64\], not \[64, 192\]")
    refused({"d2t": torch.zeros(200, dtype=torch.int64) + 100}, "d2t does not name 200 tokens of 258")


def test_a_head_of_another_target_is_refused_by_what_differs(target: Path, tmp_path: Path) -> None:
    def refused(config: HeadConfig, why: str) -> None:
        write_head(tmp_path, a_head(config))
        with pytest.raises(ValueError, match=why):
            with_pair(models(target, "off", "float32", DraftChoice("eagle", str(tmp_path))), lambda *_: None)

    refused(replace(CONFIG, vocab_size=300), "made for a vocabulary of 300, the target's is 258")
    refused(replace(CONFIG, target_hidden_size=32), "made for a hidden size of 32, the target's is 64")
    refused(replace(CONFIG, hidden_size=32), "without embed_tokens it needs the target's hidden size, 64")
    refused(replace(CONFIG, layers=(1, 2, 3)), r"\[1, 2, 3\] go beyond the target's 2 layers")


def test_whoever_cannot_serve_a_head_says_who_can(target: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is the embedded target's; name another target's with --draft_model"):
        DraftChoice("eagle").resolve("another target")
    with pytest.raises(ValueError, match="eagle needs an EAGLE-3 head"):
        with_pair(models(target, "off", "float32", DraftChoice("eagle", str(target))), lambda *_: None)
    beside = models(target, "off", "float32", DraftChoice("eagle", str(folder)))
    with pytest.raises(ValueError, match="leave --tp_degree out"):
        with_pair(replace(beside, execution=replace(beside.execution, tp_degree=2)), lambda *_: None)
    with pytest.raises(CheckpointError, match="runs beside its target alone"):
        BACKEND.load(BACKEND.find(str(folder)), ModelConfig().load_request(), Startup())
