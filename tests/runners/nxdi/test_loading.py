"""A role's models put together with --backend nxdi, as servers do it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.engine import loading
from tandem.engine.batcher import Batcher
from tandem.engine.generators import fused_generator, plain_generator
from tandem.engine.loading import DraftChoice, ModelConfig, load, load_draft, load_pair
from tandem.runners.loading import Shape
from tandem.runners.nxdi.fused import FusedDraft, FusedRunner
from tandem.runners.protocol import Runner
from tandem.runners.toy import ToyTokenizer
from tests.runners.nxdi import simulated
from tests.runners.nxdi.runners import Bench, bench  # noqa: F401
from tests.support import GREEDY, answer, ids, oracle, run

SHAPE = Shape(2, 64, 4)


@pytest.fixture
def config(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:  # noqa: F811
    monkeypatch.setattr(loading, "load_tokenizer", lambda checkpoint: ToyTokenizer())
    draft = DraftChoice("auto", str(bench.model(miss=0.3)))
    return ModelConfig(shape=SHAPE, model=str(bench.model()), draft=draft, backend="nxdi", settings=bench.settings({}))


def test_a_target_and_a_draft_worker_load_each_their_own(config: ModelConfig) -> None:
    async def scenario() -> None:
        batcher = Batcher("test")
        try:
            target, draft = await load(config, batcher), await load_draft(config, batcher, sole_model=True)
            assert draft is not None
            got = await answer(plain_generator(target).generate, ids(b"abc", 20, ignore_end_of_sequence=True))
            assert got.token_ids == oracle(b"abc", GREEDY, 20, past_the_end=True)
        finally:
            await batcher.close()
        info = plain_generator(target).info
        assert (info.backend, info.device, info.dtype, info.plain_width) == ("nxdi", "neuron", "bfloat16", 5)
        assert (info.max_sequence_length, info.max_speculation_length, info.kv_slots) == (64, 4, 2)
        assert info.end_of_sequence_ids == (257,) and info.bit_exact

    run(scenario())
    assert [app.neuron_config.speculation_length for app in simulated.LOADED] == [5, 0]


def test_a_fused_target_loads_both_in_one_graph_and_copies_nothing(config: ModelConfig) -> None:
    async def scenario() -> None:
        batcher = Batcher("test")
        try:
            target, draft = await load_pair(config, batcher)
            assert draft is not None
            assert isinstance(target.runner, FusedRunner) and isinstance(draft.runner, FusedDraft)
            generator = fused_generator(target, draft, 4, config.draft)
            got = await answer(generator.generate, ids(b"ababababab", 30, ignore_end_of_sequence=True))
        finally:
            await batcher.close()
        assert got.token_ids == oracle(b"ababababab", GREEDY, 30, past_the_end=True)
        assert set(got.completion.stats.drafted_by) == {"model"}
        assert generator.info.draft_name == draft.runner.identity.model_name
        assert not generator.info.bit_exact

    run(scenario())
    assert len(simulated.LOADED) == 1


def test_lookup_before_a_fused_graph_is_refused(config: ModelConfig) -> None:
    wanted = replace(config, draft=replace(config.draft, kind="hybrid"))
    with pytest.raises(ValueError, match="draft: a fused nxdi graph verifies only its own drafts"):
        run(load_pair(wanted, Batcher("test")))


def test_without_a_draft_model_a_fused_target_is_a_target_with_lookup(config: ModelConfig) -> None:
    async def scenario() -> None:
        batcher = Batcher("test")
        try:
            target, draft = await load_pair(replace(config, draft=DraftChoice("ngram")), batcher)
            assert draft is None
            generator = fused_generator(target, draft, 4, DraftChoice("ngram"))
            got = await answer(generator.generate, ids(b"ababababab", 30, ignore_end_of_sequence=True))
            assert got.token_ids == oracle(b"ababababab", GREEDY, 30, past_the_end=True)
        finally:
            await batcher.close()

    run(scenario())


def test_an_eagle_heads_own_tokenizer_is_not_asked_for(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(loading, "load_tokenizer", lambda checkpoint: asked.append(checkpoint.folder) or ToyTokenizer())
    wanted = replace(config, settings=replace(config.settings, eagle=True))

    async def scenario() -> list[Runner]:
        batcher = Batcher("test")
        try:
            return [loaded.runner for loaded in await load_pair(wanted, batcher) if loaded]
        finally:
            await batcher.close()

    assert len(run(scenario())) == 2
    assert asked == [config.model]
