"""The embedded target behind sessions that are lost again and again: it says what it says alone (G1, G5)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tandem.rpc.verifier_client import VerifierClient
from tandem.speculation.types import Request, SamplingParams, SpeculationStats
from tests.runners import real
from tests.support import remote_verifier, run, target_site

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


def drafted(truth: Sequence[int], rng: random.Random) -> list[int]:
    """Right up to somewhere, then wrong."""
    draft = list(truth[: rng.randrange(6)])
    if draft and rng.random() < 0.5:
        draft[rng.randrange(len(draft))] = rng.randrange(1000)
    return draft


@pytest.mark.parametrize("sampling", [real.GREEDY, real.SAMPLED], ids=["greedy", "sampled"])
def test_sessions_that_are_lost_and_rebuilt_cost_no_token_of_the_real_target(sampling: SamplingParams) -> None:
    """G1, G4, G5: each rebuilding is a prefill in other chunks; bits, and so tokens, are the same."""
    prompt, rng = real.prompt_tokens(real.PROMPTS[1]), random.Random(5)
    target = real.target("bfloat16")
    expected, _ = real.plain(target, prompt, 40, sampling)

    async def test() -> None:
        async with target_site(target) as site:
            assert site.verifier is not None
            client, stats = VerifierClient(site.address, "toy"), SpeculationStats()
            verifier, tokens, lost = remote_verifier(client, Request(sampling), stats), list(prompt), 0
            await verifier.open(tokens)
            while len(tokens) < len(prompt) + 40:
                verdict = await verifier.verify(tokens, drafted(expected[len(tokens) - len(prompt) :], rng))
                tokens += verdict.token_ids
                if rng.random() < 0.4:
                    lost += 1
                    for session in site.verifier.sessions:
                        site.verifier.sessions.forget(session.session_id)
                        site.engine.slots.release(session.resources.sequence.slot)
            assert tokens[len(prompt) :][:40] == expected and lost > 2
            await verifier.close()
            await client.close()
            assert site.free == site.engine.slots.count

    run(test())
