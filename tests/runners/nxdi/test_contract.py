"""The stand-in takes and gives what NxD Inference's real code was seen to take and give (contract.json).

Recorded from NxDI 4bcdc54 (0.9.0) with its compiled graphs replaced by the modules themselves.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generators import drafted_generator, plain_generator
from tandem.engine.load_models import Loaded
from tandem.engine.model_drafter import ModelDrafter
from tandem.runners.protocol import Runner
from tandem.speculation.verification_mode import Pipeline
from tests.runners.nxdi.contract import FILE, recorded
from tests.runners.nxdi.runners import SHAPE, Bench, bench  # noqa: F401
from tests.support import answer, fused_site, ids, run
from tests.toy import VOCAB_SIZE, ToyTokenizer

RECORDED = {json.dumps(one, sort_keys=True) for one in json.loads(FILE.read_text(encoding="utf-8"))}
WIDTH = SHAPE.max_draft + 1


def loaded(runner: Runner) -> Loaded:
    return Loaded(Engine(runner, Batcher("test")), ToyTokenizer())


@pytest.fixture
def signatures(bench: Bench) -> set[str]:  # noqa: F811
    """Of plain, drafted, fused and token-only generations, on the stand-in."""
    found: set[str] = set()
    requests = [ids(prompt, 20, ignore_end_of_sequence=True) for prompt in (b"x", b"ab", b"a longer prompt")]

    async def scenario() -> None:
        target, draft = loaded(bench.target()), loaded(bench.draft())

        def drafter(request, stats, times):
            return ModelDrafter(draft.engine, request, VOCAB_SIZE)

        argmax = {"on_device_sampling_config": {"do_sample": False}}
        for generator in (
            plain_generator(target),
            drafted_generator(target, 4, "d", drafter, Pipeline.OFF),
            plain_generator(loaded(bench.target(neuron_config=argmax))),
        ):
            await asyncio.gather(*(answer(generator.generate, request) for request in requests))
        async with fused_site(*bench.pair(), k=4) as site, site.client() as client:
            await asyncio.gather(*(answer(client.generate, request) for request in requests))

    with recorded(found, SHAPE.slots, WIDTH, VOCAB_SIZE):
        run(scenario())
    return found


def test_every_kind_of_call_is_one_that_the_real_code_took_and_answered(signatures: set[str]) -> None:
    assert [json.loads(one) for one in sorted(signatures - RECORDED)] == []


def test_every_kind_that_was_recorded_is_made_here(signatures: set[str]) -> None:
    assert [json.loads(one) for one in sorted(RECORDED - signatures)] == []
    assert {json.loads(one)["model"] for one in RECORDED} == {"plain", "window", "fused"}
