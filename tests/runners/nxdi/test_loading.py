"""A role's models put together with --backend nxdi, as servers do it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.checkpoints.locate import CheckpointError, find
from tandem.engine.batcher import Batcher, DeviceLost
from tandem.engine.generator import Generator
from tandem.engine.generators import fused_generator
from tandem.engine.load_models import load_draft, load_pair, load_unfused
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.runners.backends import LoadRequest
from tandem.runners.load_runner import Execution, Shape
from tandem.runners.startup import Startup
from tandem.speculation.types import GenerationRequest, Rule
from tandem_nxdi.backend import BACKEND
from tandem_nxdi.checkpoint import older_rope
from tests.runners.nxdi import simulated
from tests.runners.nxdi.runners import Bench, bench  # noqa: F401
from tests.support import GREEDY, SAMPLED, Answer, answer, ids, oracle, run
from tests.toy import ToyTokenizer

SHAPE = Shape(2, 64, 4)


@pytest.fixture
def config(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:  # noqa: F811
    monkeypatch.setattr(BACKEND, "tokenizer", lambda checkpoint: ToyTokenizer())
    draft = DraftChoice("auto", str(bench.model(miss=0.3)))
    return ModelConfig(shape=SHAPE, model=str(bench.model()), draft=draft, backend="nxdi", settings=bench.settings({}))


def as_eagle(config: ModelConfig, three: bool = False) -> ModelConfig:
    """The configuration with its draft as an EAGLE-1 or EAGLE-3 head."""
    target, draft = Path(str(config.model)), Path(str(config.draft.model))
    _ = simulated.as_eagle3_head(draft, target) if three else simulated.as_eagle_head(draft)
    return replace(config, settings=replace(config.settings, eagle=True))


def answers(
    config: ModelConfig, asked: Sequence[GenerationRequest], k: int | None = 4, apart: bool | None = None
) -> tuple[list[Answer], Generator]:
    """What the pair answers, and its generator; `apart`: whether its models load apart too, and are lost in the end."""

    async def scenario() -> tuple[list[Answer], Generator]:
        batcher = Batcher("test")
        try:
            target, draft = await load_pair(config, batcher)
            unfused = None if apart is None else await load_unfused(config, target, batcher)
            assert draft is not None and (unfused is not None) is bool(apart)
            generator = fused_generator(target, draft, k, config.draft, unfused=unfused)
            got = await asyncio.gather(*(answer(generator.generate, request) for request in asked))
            if unfused:
                assert unfused[1] is not None
                unfused[0].engine.lose(DeviceLost("test"))
                assert target.engine.lost.is_set() and unfused[0].engine.lost.is_set()
            return list(got), generator
        finally:
            await batcher.close()

    return run(scenario())


@pytest.mark.parametrize(
    ("tensors", "fields", "why"),
    [
        ({"lm_head.weight": None}, {}, "no lm_head.weight; --role convert --convert eagle takes it from the target"),
        ({"fc.weight": None}, {}, "no fc.weight: not an EAGLE-1 head"),
        ({"layers.0.input_layernorm.weight": torch.ones(8)}, {}, "set enable_eagle_draft_input_norm to true"),
    ],
)
def test_a_head_that_nxdi_would_fail_on_is_refused_before_anything_compiles(
    config: ModelConfig, tensors: dict[str, torch.Tensor | None], fields: dict[str, Any], why: str
) -> None:
    wanted = as_eagle(config)
    folder = Path(wanted.draft.model or "")
    own = load_file(folder / "model.safetensors") | tensors
    save_file({name: one for name, one in own.items() if one is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | fields))
    with pytest.raises(CheckpointError, match=re.escape(why)):
        run(load_pair(wanted, Batcher("test")))
    assert not simulated.COMPILED


def test_an_eagle3_head_drafts_in_one_graph_with_its_target(config: ModelConfig) -> None:
    """NxDI is told of it on both sides, and of what it needs besides."""
    (got,), _ = answers(as_eagle(config, three=True), [ids(b"abab", 20, ignore_end_of_sequence=True)])
    assert got.token_ids == oracle(b"abab", GREEDY, 20, past_the_end=True)
    (application,) = simulated.LOADED
    draft = application.config.fused_spec_config.draft_config.neuron_config
    for neuron in (application.neuron_config, draft):
        assert neuron.is_eagle3 and neuron.enable_eagle_speculation and neuron.sequence_parallel_enabled
        assert neuron.given["enable_eagle_draft_input_norm"] and neuron.speculation_length == 5
    assert (draft.is_eagle_draft, draft.enable_fused_speculation) == (True, False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"draft": {"draft_vocab_size": 4}},
            "d2t: the head drafts from 4 of 258 tokens, and NxD Inference maps none; --r",
        ),
        ({"draft": {"midlayer": 1}}, "midlayer: not Llama's name; --role convert --convert eagle writes that"),
        (
            {"draft": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}},
            "NxD Inference hands out those after [2, 4, 5] alone",
        ),
        ({"draft": {"norm_before_residual": True}}, "norm_before_residual: true: NxD Inference computes false"),
        ({"target": {"num_hidden_layers": 6}}, "num_hidden_layers: the target has 6"),
        ({"flag": False}, "an EAGLE-3 head: with NxD Inference it drafts by --draft model --eagle"),
    ],
)
def test_an_eagle3_head_that_nxdi_cannot_run_is_refused_before_anything_compiles(
    config: ModelConfig, change: dict[str, Any], why: str
) -> None:
    wanted = as_eagle(config, three=True)
    wanted = replace(wanted, settings=replace(wanted.settings, eagle=change.get("flag", True)))
    assert wanted.model is not None and wanted.draft.model is not None
    folders = {"target": Path(wanted.model), "draft": Path(wanted.draft.model)}
    for name, fields in change.items():
        if name in folders:
            file = folders[name] / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    tensors = load_file(folders["draft"] / "model.safetensors")
    fields = change.get("draft", {})
    if "draft_vocab_size" in fields:
        tensors |= {"lm_head.weight": torch.ones(4, 8), "d2t": torch.arange(4)}
    if "midlayer" in fields:
        tensors = {name.replace("layers.0", "midlayer"): one for name, one in tensors.items()}
    save_file(tensors, folders["draft"] / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(why)):
        run(load_pair(wanted, Batcher("test")))
    assert not simulated.COMPILED


def test_a_head_has_no_place_but_beside_its_target(config: ModelConfig) -> None:
    wanted = as_eagle(config, three=True)
    with pytest.raises(ValueError, match="in one graph with its target"):
        run(load_draft(wanted, Batcher("test")))
    with pytest.raises(ValueError, match="eagle is not of backend nxdi, whose heads are --draft model --eagle"):
        run(load_pair(replace(wanted, draft=replace(wanted.draft, kind="eagle")), Batcher("test")))


def test_what_a_fused_graph_cannot_answer_the_same_models_answer_apart(config: ModelConfig, tmp_path: Path) -> None:
    """Sampled, biased and structured requests, beside greedy ones; each placement learns from its own rounds."""
    plain_draft = {"quantized": False}
    fused = {**FUSED_FIELDS, "quantized_checkpoints_path": str(tmp_path / "quantized")}
    settings = replace(config.settings, neuron_config=fused, draft_neuron_config=plain_draft)
    wanted = replace(config, settings=settings)
    rest: dict[str, Any] = {"ignore_end_of_sequence": True, "speculation_length": 3}
    asked = {
        "greedy": ids(b"ababababab", 30, **rest),
        "sampled": ids(b"ababababab", 30, sampling=SAMPLED, **rest),
        "rejection": ids(b"ababababab", 30, sampling=SAMPLED, rule=Rule.REJECTION, **rest),
        "logprobs": ids(b"ababababab", 5, logprobs=2, **rest),
    }

    found, generator = answers(wanted, list(asked.values()), None, apart=True)
    got = dict(zip(asked, found, strict=True))
    assert got["greedy"].token_ids == oracle(b"ababababab", GREEDY, 30, past_the_end=True)
    assert got["sampled"].token_ids == oracle(b"ababababab", SAMPLED, 30, past_the_end=True)
    assert got["logprobs"].token_ids == oracle(b"ababababab", GREEDY, 5, past_the_end=True)
    placements = {name: one.completion.stats.placement for name, one in got.items()}
    assert placements == {"greedy": "", "sampled": "apart", "rejection": "apart", "logprobs": "apart"}
    assert all(one.completion.stats.drafted for one in got.values())
    assert generator.fallback and generator.fallback.estimate is not generator.estimate
    made = [app.neuron_config for app in simulated.LOADED]
    kinds = [(one.speculation_length, one.enable_fused_speculation, one.quantized) for one in made]
    assert kinds == [(5, True, True), (5, False, True), (0, False, False)]
    assert [app.neuron_config.on_device_sampling_config is None for app in simulated.LOADED] == [False, True, True]


FUSED_FIELDS = {
    "on_device_sampling_config": {"do_sample": False, "top_k": 1},
    "speculation_length": 5,
    "quantized": True,
    "modules_to_not_convert": ["lm_head"],
}


def test_apart_alone_the_pair_answers_every_request_without_the_graph(config: ModelConfig) -> None:
    wanted = replace(config, settings=replace(config.settings, pair="apart"))

    asked = [ids(b"ababab", 30, sampling=s, ignore_end_of_sequence=True) for s in (GREEDY, SAMPLED)]
    for got, sampling in zip(answers(wanted, asked, apart=False)[0], (GREEDY, SAMPLED), strict=True):
        assert got.token_ids == oracle(b"ababab", sampling, 30, past_the_end=True)
        assert got.completion.stats.drafted and not got.completion.stats.placement
    assert [app.neuron_config.enable_fused_speculation for app in simulated.LOADED] == [False, False]
    assert [app.neuron_config.speculation_length for app in simulated.LOADED] == [5, 0]


def test_lookup_before_a_fused_graph_is_refused(config: ModelConfig) -> None:
    wanted = replace(config, draft=replace(config.draft, kind="hybrid"))
    with pytest.raises(ValueError, match="draft: a fused nxdi graph verifies only its own drafts"):
        run(load_pair(wanted, Batcher("test")))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({}, {}),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    ],
)
def test_a_rotary_embedding_is_read_as_transformers_5_writes_it(
    bench: Bench,  # noqa: F811
    written: dict[str, object],
    read: dict[str, object],
) -> None:
    """transformers 4.57, which NxDI reads config.json with, knows the older fields alone and says nothing."""
    folder = simulated.model_folder(bench.folder, "rope", **written)
    assert older_rope(str(folder)) == read
    BACKEND.load(find(str(folder)), LoadRequest(Execution(), SHAPE, bench.settings({})), Startup())
    assert simulated.LOADED[-1].config.rope_theta == (5e5 if written else 10000.0)


def test_a_rotary_embedding_for_each_kind_of_layer_is_refused(bench: Bench) -> None:  # noqa: F811
    folder = simulated.model_folder(bench.folder, "rope", rope_parameters={"full_attention": {"rope_theta": 1e6}})
    with pytest.raises(CheckpointError, match="rope_parameters have no rope_theta"):
        BACKEND.load(find(str(folder)), LoadRequest(Execution(), SHAPE, bench.settings({})), Startup())
