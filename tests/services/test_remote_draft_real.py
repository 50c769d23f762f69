"""The embedded pair, the draft behind Propose: the target says what it says alone."""

from __future__ import annotations

import pytest

from tandem.engine.model_config import ModelConfig
from tandem.runners.loading import Execution, Shape
from tandem.speculation.types import SamplingParams
from tests.runners import real
from tests.support import answer, ids, remote_draft, run, worker_site

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.mark.parametrize("sampling", [real.GREEDY, real.SAMPLED], ids=["greedy", "sampled"])
def test_a_target_that_drives_the_shipped_draft_says_what_it_says_alone(sampling: SamplingParams) -> None:
    tokens = real.prompt_tokens(real.PROMPTS[0])
    target = real.target("bfloat16")
    expected, _ = real.plain(target, tokens, 40, sampling)
    config = ModelConfig(Execution("cpu", "bfloat16"), Shape(2, 256, 5))

    async def test() -> None:
        async with (
            worker_site(None, config=config) as site,
            remote_draft(site.address, target, tokenizer=real.tokenizer()) as (generator, client),
        ):
            assert generator.info.draft_name == "remote:ngram+embedded_draft"
            got = await answer(generator.generate, ids(tokens, 40, sampling=sampling, ignore_end_of_sequence=True))
            assert list(got.token_ids) == expected
            stats = got.completion.stats
            assert 0 < stats.accepted <= stats.drafted
            assert stats.bytes_up < 40 * stats.rounds + 4 * len(tokens) + 200
            assert client.health.undrafted == 0

    run(test())
