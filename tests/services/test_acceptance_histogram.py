"""How many rounds accepted 0, 1, 2, ... drafts: the counts of a completion add up in every architecture."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
from pathlib import Path

import pytest

import tandem
from tandem.clients.profile import Profile
from tandem.rpc import wire
from tandem.runners.toy import ToyConfig
from tandem.speculation.depth import Pipeline
from tandem.speculation.types import Chunk, FinishReason, GenerationEnd, SpeculationStats, Verdict
from tests.daily import daily
from tests.services.test_drafts import PLACES, Place
from tests.support import GREEDY, SAMPLED, answer, distributed, fused_site, ids, oracle, run, target_site, toy

PROMPT = b"again and again and again and "


def adds_up(stats: SpeculationStats) -> None:
    counts = stats.acceptance_histogram
    assert sum(counts) == stats.rounds, stats
    assert sum(accepted * rounds for accepted, rounds in enumerate(counts)) == stats.accepted, stats


def test_each_round_counts_once_by_what_it_accepted() -> None:
    stats = SpeculationStats()
    assert stats.acceptance_histogram == (0,)
    for drafted, accepted in ((3, 3), (3, 0), (0, 0), (2, 1), (5, 3)):
        stats.observe(range(drafted), Verdict(tuple(range(accepted + 1)), accepted))
    assert stats.acceptance_histogram == (2, 1, 0, 2, 0, 0)
    adds_up(stats)


@pytest.mark.parametrize("place", daily(PLACES.values(), 0, 5, 8, 12, 16), ids=list(PLACES))
def test_the_counts_of_a_completion_add_up_in_every_architecture(place: Place) -> None:
    async def test() -> None:
        async with place.deployed() as generate:
            asked = [
                ids(PROMPT, 40, sampling=each, speculation_length=k) for each in (GREEDY, SAMPLED) for k in (None, 4)
            ]
            for got in await asyncio.gather(*(answer(generate, each) for each in asked)):
                stats = got.completion.stats
                adds_up(stats)
                assert stats.accepted + stats.rounds >= len(got.token_ids), "every round commits a token of its own"

    run(test())


@pytest.mark.parametrize("pipeline", daily(Pipeline, 2))
def test_the_counts_add_up_where_a_request_goes_on_at_another_target(pipeline: Pipeline) -> None:
    async def test() -> None:
        slow = ToyConfig(step_seconds=0.004)
        async with contextlib.AsyncExitStack() as first, target_site(toy(slow)) as second:
            target = await first.enter_async_context(target_site(toy(slow)))
            addresses, moved, tokens = f"{target.address},{second.address}", False, list[int]()
            async with distributed(addresses, "miss=0.3", pipeline=pipeline) as (generator, _):
                async for event in generator.generate(ids(PROMPT, 100)):
                    if isinstance(event, Chunk):
                        tokens += event.token_ids
                        moved = moved or second.free < 4
                        if len(tokens) > 8:
                            await first.aclose()
                    else:
                        adds_up(event.stats)
                assert moved and tuple(tokens) == oracle(PROMPT, GREEDY, 100)

    run(test())


def test_the_end_message_and_a_completion_carry_the_counts() -> None:
    async def test() -> tandem.Completion:
        async with fused_site(toy(), toy()) as site, tandem.AsyncClient(site.address) as client:
            return await client.generate(list(PROMPT), max_new_tokens=24, ignore_end_of_sequence=True)

    completion = run(test())
    counts = completion.statistics.acceptance_histogram
    assert counts == (0, 0, 0, 0, 0, 4), "a draft that is always right: 4 rounds of 5 drafts and a token"
    message = wire.completion_to_wire(GenerationEnd(FinishReason.LENGTH, 30, 24, completion.statistics))
    assert tuple(message.stats.acceptance_histogram) == counts


def test_a_profile_has_the_counts(tmp_path: Path) -> None:
    stats = SpeculationStats(rounds=4, drafted=10, accepted=6, accepted_per_position=[4, 2])
    profile = Profile("test", tmp_path)
    profile.add(GenerationEnd(FinishReason.LENGTH, 5, 10, stats), 1.0)
    table, document = profile.write()
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert row["acceptance_histogram"] == "(0, 2, 2)"
    assert json.loads(document.read_text())[0]["acceptance_histogram"] == [0, 2, 2]
