"""The embedded pair, a target that never waits: it says what it says alone, in every dtype, and in int8."""

from __future__ import annotations

import pytest

from tandem.engine.model_config import ModelConfig
from tandem.runners.loading import Shape
from tandem.speculation.depth import Pipeline
from tandem.speculation.types import SamplingParams
from tests.runners import real
from tests.support import answer, distributed, ids, run, target_site

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8/float32"])
@pytest.mark.parametrize("sampling", [real.GREEDY, real.SAMPLED], ids=["greedy", "sampled"])
def test_a_target_that_never_waits_says_what_it_says_alone(dtype: str, sampling: SamplingParams) -> None:
    tokens = real.prompt_tokens(real.PROMPTS[0])
    target = real.target(dtype)
    expected, _ = real.plain(target, tokens, 40, sampling)
    config = ModelConfig(real.execution(dtype), Shape(2, 256, 5))

    async def test() -> None:
        async with (
            target_site(target, tokenizer=real.tokenizer()) as site,
            distributed(site.address, config=config, pipeline=Pipeline.NEVER_WAITING) as (generator, _),
        ):
            got = await answer(generator.generate, ids(tokens, 40, sampling=sampling, ignore_end_of_sequence=True))
            assert list(got.token_ids) == expected
            stats = got.completion.stats
            assert stats.run_steps == stats.rounds
            assert stats.drafted + stats.stale_drafts > 0
            assert stats.wasted_steps == 0

    run(test())
