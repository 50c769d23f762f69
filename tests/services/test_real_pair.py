"""The embedded pair over gRPC, as `make test` shows it: real tokens, the same from every architecture.

`make thorough` has all formats, steps and faults: tests/runners/test_exactness.py, test_*_real.py, tests/conformance.
"""

from __future__ import annotations

import pytest

from tandem.checkpoints.locate import embedded_draft, find
from tandem.engine.model_config import ModelConfig
from tandem.runners.loading import Execution, Shape, load_runner
from tandem.speculation.types import SamplingParams
from tests.daily import daily
from tests.runners import real
from tests.support import answer, distributed, fused_site, ids, run, target_site

FORM, SHAPE = "bfloat16", Shape(2, 256, 5)


@pytest.mark.parametrize(
    ("sampling", "count"),
    daily([(real.GREEDY, 12), (real.GREEDY, 24), (real.SAMPLED, 24)], 0),
    ids=["greedy", "greedy, longer", "sampled"],
)
def test_plain_fused_and_distributed_say_what_the_target_says(sampling: SamplingParams, count: int) -> None:
    # As a server is started: steps that passed their check on this machine are not checked again.
    target, draft = (
        load_runner(checkpoint, Execution("cpu", FORM, 2, recertify=False), SHAPE, verifies)
        for checkpoint, verifies in ((real.checkpoint(), True), (find(embedded_draft()), False))
    )
    for runner in (target, draft):
        runner.warm_up()
    tokens = real.prompt_tokens(real.PROMPTS[0])
    expected, _ = real.plain(target, tokens, count, sampling)
    asked = ids(tokens, count, sampling=sampling, ignore_end_of_sequence=True)

    async def test() -> None:
        async with target_site(target, tokenizer=real.tokenizer()) as site, site.client() as client:
            assert list((await answer(client.generate, asked)).token_ids) == expected
            config = ModelConfig(Execution("cpu", FORM, 2), SHAPE)
            async with distributed(site.address, config=config) as (generator, _):
                got = await answer(generator.generate, asked)
            assert list(got.token_ids) == expected and got.completion.stats.accepted > 0
        async with fused_site(target, draft, tokenizer=real.tokenizer()) as site, site.client() as client:
            got = await answer(client.generate, asked)
            assert list(got.token_ids) == expected and got.completion.stats.accepted > 0

    run(test())
