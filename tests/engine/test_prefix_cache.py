"""Prefixes that later sequences begin with: the tokens are those of the target alone, and less is processed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.engine import prefix_cache
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.model_drafter import ModelDrafter
from tandem.engine.prefix_cache import MIB, PrefixCache, PrefixSharing, page_counts, share_prefixes
from tandem.engine.sequences import LocalVerifier
from tandem.runners.capabilities import PAGE, Capabilities
from tandem.runners.protocol import PrefillRow
from tandem.speculation.types import LengthPlan, Request, SamplingParams, SpeculationStats
from tests.support import GREEDY, SAMPLED, oracle, toy
from tests.toy import ToyRunner

PROMPT = list(b"these are four pages of a prompt that many callers begin with ..and its end")
OTHER = PROMPT[: 3 * PAGE] + list(b"and then it goes on in another way")
NEVER = list(range(100, 150))
both_samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


class Noting(ToyRunner):
    """Notes what is processed. Drafting spoils the slots and fails when told to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prefills: list[PrefillRow] = []
        self.fails_now = False

    @property
    def processed(self) -> int:
        return sum(len(row.tokens) for row in self.prefills)

    def prefill(self, rows: Sequence[PrefillRow]) -> Any:
        self.prefills += rows
        return super().prefill(rows)

    def propose(self, rows: Any) -> Any:
        if self.fails_now:
            for row in rows:
                self._cache[row.slot] = 7
            raise RuntimeError("the step failed and spoiled its slots")
        return super().propose(rows)


@contextlib.asynccontextmanager
async def engine_with(
    pages: int | None = None, sharing: str = "identity", scope: list[str] | None = None, **settings: Any
) -> AsyncIterator[tuple[Engine, Noting]]:
    """An engine whose prefixes are in `pages` pages; the scope of a request is the last of `scope`."""
    runner = toy(kind=Noting, **settings)
    assert isinstance(runner, Noting)
    engine = Engine(runner, Batcher("test"), vital=False)
    if pages is None:
        await share_prefixes([engine], PrefixSharing(sharing, 1), lambda: scope[-1] if scope else "")
    else:
        engine.prefixes = PrefixCache(runner, runner.page_store(pages), pages)
    try:
        yield engine, runner
    finally:
        await engine.batcher.close()


async def said(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams = GREEDY, count: int = 8
) -> tuple[tuple[int, ...], int]:
    """What the target says, and how many tokens of the prompt were not processed for it."""
    stats = SpeculationStats()
    verifier, tokens = LocalVerifier(engine, Request(sampling), stats=stats), list(prompt)
    try:
        await verifier.open(tokens)
        while len(tokens) < len(prompt) + count:
            tokens += (await verifier.verify(tokens, ())).token_ids
    finally:
        await verifier.close()
    return tuple(tokens[len(prompt) :]), stats.cached_prompt_tokens


def truth(prompt: Sequence[int], sampling: SamplingParams = GREEDY, count: int = 8) -> tuple[int, ...]:
    return oracle(prompt, sampling, count, past_the_end=True)


@both_samplings
async def test_what_a_prompt_begins_with_is_copied_and_only_the_rest_is_processed(sampling: SamplingParams) -> None:
    async with engine_with() as (engine, runner):
        assert await said(engine, PROMPT, sampling) == (truth(PROMPT, sampling), 0)
        whole = runner.processed
        assert whole == len(PROMPT) - 1
        assert await said(engine, PROMPT, sampling) == (truth(PROMPT, sampling), 4 * PAGE)
        assert runner.processed == whole + len(PROMPT) - 1 - 4 * PAGE
        assert await said(engine, OTHER, sampling) == (truth(OTHER, sampling), 3 * PAGE)
        assert await said(engine, NEVER, sampling) == (truth(NEVER, sampling), 0)
        assert await said(engine, PROMPT[: 2 * PAGE], sampling) == (truth(PROMPT[: 2 * PAGE], sampling), PAGE), (
            "the last token is always processed"
        )
        assert engine.slots.free == engine.slots.count


@both_samplings
async def test_pages_are_replaced_while_a_row_goes_on_from_them(sampling: SamplingParams) -> None:
    async with engine_with(pages=4) as (engine, _):
        await said(engine, PROMPT, sampling)
        stats = SpeculationStats()
        verifier, tokens = LocalVerifier(engine, Request(sampling), stats=stats), list(PROMPT)
        await verifier.open(tokens)
        assert stats.cached_prompt_tokens == 4 * PAGE
        for n in range(12):
            other = [n, *NEVER, *PROMPT]
            assert await said(engine, other, sampling, 2) == (truth(other, sampling, 2), 0)
            tokens += (await verifier.verify(tokens, ())).token_ids
        await verifier.close()
        assert tuple(tokens[len(PROMPT) :]) == truth(PROMPT, sampling, 12)
        assert engine.prefixes and engine.prefixes.tree.evicted >= 4


async def test_what_is_kept_stays_within_the_memory_that_was_given() -> None:
    async with engine_with(max_length=400) as (engine, _):
        assert engine.prefixes
        assert 0 < engine.prefixes.limit_bytes <= MIB
        for n in range(70):
            await said(engine, [n, *range(250)], count=1)
            assert engine.prefixes.used_bytes <= engine.prefixes.limit_bytes
        assert engine.prefixes.used_bytes == engine.prefixes.limit_bytes, "it is used, too"
        assert engine.prefixes.tree.evicted


def test_the_memory_is_divided_so_that_all_models_keep_the_same_tokens() -> None:
    class Large(ToyRunner):
        page_bytes = 100_000

    class Unable(ToyRunner):
        capabilities = Capabilities()

    runners = [toy(), toy(kind=Large), toy(kind=Unable)]
    small, large, none = page_counts(PrefixSharing("all", 8), runners)
    assert small == large == 8 * MIB // (128 + 100_000 + 2 * 1024)
    assert none == 0
    assert page_counts(PrefixSharing("off", 8), runners) == [0, 0, 0]


def test_by_default_a_sequence_of_each_slot_is_kept_in_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = toy(slots=4, max_length=1024)  # 256 pages
    here = SimpleNamespace(identity=replace(runner.identity, device="cpu"), limits=runner.limits)
    for free, page, wanted in ((2**40, MIB, 256), (2**31, MIB, 128), (2**40, 8, 64), (None, MIB, 64)):
        monkeypatch.setattr(prefix_cache, "free_bytes", lambda free=free: free)
        assert prefix_cache.own_bytes(cast(Any, here), page) == wanted * MIB
        assert prefix_cache.own_bytes(runner, page) == 64 * MIB, "a device has memory of its own"


@both_samplings
async def test_pages_whose_copy_failed_are_not_found(sampling: SamplingParams) -> None:
    """Their memory holds what it held before: copied into a slot, that would give wrong tokens, unnoticed."""
    async with engine_with(max_length=300) as (engine, _):
        assert engine.prefixes
        store, save = engine.prefixes._store, engine.prefixes._store.save

        failed = []

        def fails(slot: int, first: int, pages: Sequence[int]) -> None:
            failed.append(pages)
            raise MemoryError("no memory for the copy")

        verifier, tokens = LocalVerifier(engine, Request(sampling)), PROMPT[:PAGE]
        await verifier.open(tokens)
        while len(tokens) < 5 * PAGE:
            tokens += (await verifier.verify(tokens, ())).token_ids
        store.save = fails  # type: ignore[method-assign]
        await verifier.close()
        await engine.batcher.on_device(int)
        store.save = save  # type: ignore[method-assign]
        assert failed
        assert await said(engine, tokens, sampling) == (truth(tokens, sampling), 0)
        assert await said(engine, tokens, sampling) == (truth(tokens, sampling), (len(tokens) - 1) // PAGE * PAGE)


async def test_a_step_that_fails_leaves_nothing_of_its_slots() -> None:
    """A draft's engine goes on after it: what its failed step spoiled must not be found by later sequences."""
    async with engine_with() as (engine, runner):
        drafter = ModelDrafter(engine, Request(GREEDY), 258)
        await drafter.open(PROMPT[: 2 * PAGE])
        known = len(engine.prefixes.tree) if engine.prefixes else 0
        longer = [*PROMPT[: 2 * PAGE], *range(2 * PAGE)]
        await drafter.propose(longer, LengthPlan(2, 2))
        runner.fails_now = True
        with pytest.raises(RuntimeError):
            await drafter.propose(longer, LengthPlan(2, 2))
        runner.fails_now = False
        await drafter.close()
        await engine.batcher.on_device(int)
        assert engine.prefixes
        found = engine.prefixes.tree.match(("", 0), longer)
        assert found == engine.prefixes.tree.match(("", 0), longer[: 4 * PAGE - 2]) != []
        assert known
        for prompt in (longer, PROMPT):
            drafter = ModelDrafter(engine, Request(GREEDY), 258)
            await drafter.open(prompt)
            assert (await drafter.propose(prompt, LengthPlan(3, 3))).token_ids == truth(prompt, count=3)
            await drafter.close()


@pytest.mark.parametrize(
    ("sharing", "megabytes", "message"),
    [
        ("everyone", 64, "prefix_sharing: 'everyone' is not one of identity, all, off"),
        ("all", 0, "prefix_cache_mb: 0 is below 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(sharing: str, megabytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixSharing(sharing, megabytes)
