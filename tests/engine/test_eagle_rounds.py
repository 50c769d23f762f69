"""Rounds of a toy head, an oracle: with the right features fed at the right time it is always right, else it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.engine.compatibility import able
from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.rpc.received_errors import TandemError
from tandem.runners.capabilities import PAGE, No, Pages
from tandem.runners.protocol import RowFailed, VerifyRow
from tandem.speculation.request import Drafts
from tandem.speculation.types import Verdict
from tests.engine.test_adapters import truth
from tests.support import GREEDY, SAMPLED, answer, fused_site, ids, oracle, toy
from tests.toy import BACKEND, ToyConfig, ToyRunner
from tests.toy_head import ToyHead

PROMPT = b"a prompt of more tokens than a prefill step takes"


class FailsOnce(ToyRunner):
    """A target of which one row fails, in the given verification."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.left = 3

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | RowFailed]:
        self.left -= 1
        return [RowFailed("a failure")] * len(rows) if not self.left else super().verify(rows)


def pair(config: ToyConfig = ToyConfig(), slots: int = 4, kind: Any = ToyRunner) -> tuple[ToyRunner, ToyHead]:  # noqa: B008
    target = toy(slots=slots, kind=kind)
    return target, ToyHead(target.limits, config, target)


@pytest.mark.each_value
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_a_head_that_gets_every_feature_is_always_right(k: int, sampling: Any) -> None:
    async with fused_site(*pair(), kind="eagle") as site, site.client() as client:
        for prompt in (PROMPT, b"a", b"ab"):
            got = await answer(client.generate, ids(prompt, 60, sampling=sampling, speculation_length=k))
            assert got.token_ids == oracle(prompt, sampling, 60)
            stats = got.completion.stats
            assert stats.accepted == stats.drafted > 0, prompt
            assert stats.rounds == -(-60 // (k + 1))


async def test_a_head_is_right_after_prefixes_too_because_pages_hold_its_targets_features() -> None:
    target, head = pair(slots=1)
    async with fused_site(target, head, kind="eagle") as site, site.client() as client:
        await share_prefixes([site.engine], PrefixSharing("all", 1), lambda: "")
        for prompt, cached in ((PROMPT, 0), (PROMPT[::-1], 0), (PROMPT, 48), (PROMPT[:40], 32)):
            got = await answer(client.generate, ids(prompt, 30))
            stats = got.completion.stats
            assert got.token_ids == oracle(prompt, GREEDY, 30)
            assert stats.accepted == stats.drafted > 0 and stats.cached_prompt_tokens == cached
        said = [*PROMPT, *oracle(PROMPT, GREEDY, 30)]
        turn = bytes(token for token in said if token < 256) + b"and then?"
        got = await answer(client.generate, ids(turn, 30))
        assert got.token_ids == oracle(turn, GREEDY, 30)
        stats = got.completion.stats
        assert stats.accepted == stats.drafted > 0, "of answers too"
        assert stats.cached_prompt_tokens == (len(said) - 1) // PAGE * PAGE == 64
    assert isinstance(able(target).pages, Pages) and isinstance(able(head).pages, No)


async def test_after_a_failed_row_the_head_is_right_again() -> None:
    async with fused_site(*pair(kind=FailsOnce), kind="eagle") as site, site.client() as client:
        got = await answer(client.generate, ids(PROMPT, 60, speculation_length=4))
        stats = got.completion.stats
        assert got.token_ids == oracle(PROMPT, GREEDY, 60)
        assert stats.accepted == stats.drafted > 40


@pytest.mark.parametrize("kind", ["eagle", "hybrid"])
async def test_requests_with_an_adapter_are_drafted_by_lookup_and_the_others_by_the_head(kind: str) -> None:
    async with fused_site(*pair(), kind=kind) as site, site.client() as client:
        await site.engine.adapters.add(AdapterChoice("red", "red"), BACKEND.adapter)
        for sampling in (GREEDY, SAMPLED):
            names = ("", "red", "", "red")
            asked = [ids(PROMPT, 40, sampling=sampling, adapter=name, speculation_length=4) for name in names]
            answers = await asyncio.gather(*(answer(client.generate, one) for one in asked))
            for name, got in zip(names, answers, strict=True):
                assert tuple(got.token_ids) == truth(name, sampling, 40, tuple(PROMPT))
                stats = got.completion.stats
                assert ("model" in stats.drafted_by) == (not name)
        with pytest.raises(TandemError, match="head is not available"):
            await answer(client.generate, ids(PROMPT, 4, adapter="red", drafts=Drafts.HEAD))
