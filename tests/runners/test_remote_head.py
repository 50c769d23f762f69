"""A head away from its target: over the wire it drafts what it drafts beside it, and no bit of the target changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoints.locate import CheckpointError
from tandem.engine.batcher import Batcher
from tandem.engine.load_models import Loaded, load
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.engine.sequences import TargetSequence
from tandem.runners.eagle.module import write_head
from tandem.speculation.types import Request
from tests.runners.test_eagle import CONFIG, a_head, models
from tests.runners.tiny import byte_tokenizer, model_folder
from tests.support import Site, distributed, drafting, target_site

LAYERS = (1, 2)  # of CONFIG.layers: 1, 1, 2


pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.asynccontextmanager
async def served(
    target: Path, how: str, dtype: str, layers: tuple[int, ...] = LAYERS
) -> AsyncIterator[tuple[Site, Loaded]]:
    """A TargetVerifier that hands out features, and what it serves."""
    batcher = Batcher("test-loading")
    loaded = await load(models(target, how, dtype, DraftChoice("ngram")), batcher)
    async with target_site(loaded.runner, tokenizer=loaded.tokenizer, features=layers) as site:
        yield site, loaded
    await batcher.close()


def head_config(
    target: Path, folder: Path, dtype: str, kind: str = "eagle", how: str = "native", **wish: Any
) -> ModelConfig:
    config = models(target, how, dtype, DraftChoice(kind, str(folder), **wish))
    return replace(config, shape=replace(config.shape, chunk=32))


@pytest.mark.parametrize("how", ["native", "off"])
async def test_features_are_the_same_bits_from_a_prefill_a_verdict_a_shared_step_and_a_kept_prefix(
    target: Path, how: str
) -> None:
    async with served(target, how, "bfloat16") as (site, _):
        engine = site.engine
        assert engine is not None and engine.features is not None
        await share_prefixes([engine], PrefixSharing("all", 4), lambda: "")
        spec = engine.features.spec(LAYERS)
        text = [60 + 7 * i % 150 for i in range(30)]

        async def verdicts(tokens: list[int]) -> bytes:
            slot = await engine.slots.acquire()
            sequence = TargetSequence(engine, slot, Request(features=spec))
            await sequence.fill(tokens[:4])
            whole = await sequence.features(spec, 0, 4)
            while len(sequence.held) < len(tokens) - 1:  # each is fed again where the target says another
                known = tokens[: len(sequence.held) + 1]
                draft = tokens[len(known) : len(known) + 3]
                verdict = await sequence.verify(known, draft)
                whole += verdict.features
            engine.slots.release(slot)
            return whole

        copied: list[int] = []

        async def filled(tokens: list[int]) -> bytes:
            slot = await engine.slots.acquire()
            sequence = TargetSequence(engine, slot, Request())
            copied.append(await sequence.fill(tokens[:-1]))
            whole = await sequence.features(spec, 0, len(tokens) - 1)
            sequence.close()
            return whole

        alone = await verdicts(text)
        assert len(alone) == (len(text) - 1) * spec.position_bytes and len(set(alone)) > 100
        assert await filled(text) == alone
        assert await filled(text) == alone and copied[0] < copied[1]  # by then from the pages of a prefix
        together = await asyncio.gather(verdicts(text), verdicts(text[::-1]))
        assert together[0] == alone


async def test_what_does_not_fit_is_refused_by_name(target: Path, folder: Path, tmp_path: Path) -> None:
    async def refusal(head: Path, model: Path = target, layers: tuple[int, ...] = LAYERS) -> str:
        async with served(target, "native", "float32", layers) as (site, _):
            with pytest.raises(ValueError) as refused:
                async with distributed(site.address, config=head_config(model, head, "float32")):
                    pass
            return str(refused.value)

    assert "reads layer 2" in await refusal(folder, layers=(1,))
    other = model_folder(tmp_path / "other", seed=6)
    assert "name the same weights with --target_model" in await refusal(folder, other)
    own = tmp_path / "own"
    write_head(own, a_head(), embedding=torch.zeros(258, 64))
    async with (  # with an embedding of its own, any folder serves
        served(target, "native", "float32") as (site, _),
        distributed(site.address, config=head_config(other, own, "float32")),
    ):
        pass
    wide = tmp_path / "wide"
    write_head(wide, a_head(replace(CONFIG, target_hidden_size=32)))
    assert "made for a hidden size of 32" in await refusal(wide)
    few = tmp_path / "few"
    write_head(few, a_head(replace(CONFIG, vocab_size=250)), embedding=torch.zeros(250, 64))
    assert "made for a vocabulary of 250" in await refusal(few)
    bare = tmp_path / "bare"
    byte_tokenizer().save_pretrained(bare)
    (bare / "config.json").write_text((target / "config.json").read_text())
    torch.save({"other": torch.zeros(1)}, bare / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"name its folder with --target_model; .*bare has none of"):
        async with drafting(head_config(bare, folder, "float32")):
            pass
