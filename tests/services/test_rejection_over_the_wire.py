"""The rejection rule end to end: negotiated at open, exact in law, the same tokens wherever the draft runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import grpc
import numpy as np
import pytest

from tandem.rpc.received_errors import TandemError
from tandem.rpc.wire_sessions import distributions_to_wire
from tandem.services.security.callers import ANONYMOUS
from tandem.services.sessions.table import SessionKey
from tandem.speculation.rejection import draft_token
from tandem.speculation.request import Drafts
from tandem.speculation.types import GenerationRequest, Rule, SamplingParams
from tandem.v1 import generation_pb2
from tests.daily import daily
from tests.speculation.laws import chain_law, chi_square_p_value, reference_law
from tests.support import (
    SAMPLED,
    ForgetfulRunner,
    Generate,
    answer,
    distributed,
    forget,
    fused_site,
    ids,
    in_front,
    opening,
    oracle,
    raw_stub,
    target_site,
    toy,
    verifying,
    worker_site,
)
from tests.toy import END, ToyConfig, toy_logits

PROMPT = list(b"abcabcabc")
FREE = SamplingParams(temperature=0.8, seed=3)
REJECTION = generation_pb2.VERIFICATION_RULE_REJECTION
DRAFTS = {"perfect": "salt=0", "noisy": "miss=0.3", "other": "salt=9", "n-gram": None}


def asked(sampling: SamplingParams, k: int = 3, count: int = 24, rule: Rule = Rule.REJECTION) -> GenerationRequest:
    return ids(PROMPT, count, sampling=sampling, speculation_length=k, rule=rule)


@contextlib.asynccontextmanager
async def everywhere(draft: str | None) -> AsyncIterator[dict[str, Generate]]:
    """`generate` of the fused server, the draft worker and the draft role, with the same draft."""
    values = dict(part.split("=") for part in (draft or "").split(",") if part)
    config = ToyConfig(int(values.get("salt", 0)), float(values.get("miss", 0)))
    async with (
        target_site() as target,
        fused_site(toy(), toy(config) if draft else None) as fused,
        fused.client() as fused_client,
        worker_site(target.address, draft) as worker,
        worker.client() as worker_client,
        distributed(target.address, draft) as (generator, _),
    ):
        yield {"fused": fused_client.generate, "worker": worker_client.generate, "role": generator.generate}


SAMPLINGS, LENGTHS = (FREE, SAMPLED, replace(SAMPLED, temperature=1.5, seed=2**63)), (1, 3, 5)


@pytest.mark.parametrize("asking", daily([[*zip(SAMPLINGS, LENGTHS, strict=True)], [*product(SAMPLINGS, LENGTHS)]], 0))
@pytest.mark.parametrize("draft", daily(DRAFTS, 1))
async def test_one_draft_one_seed_one_output_wherever_the_draft_runs(
    draft: str, asking: list[tuple[SamplingParams, int]]
) -> None:
    async with everywhere(DRAFTS[draft]) as generates:
        for sampling, k in asking:
            answers = [await answer(generate, asked(sampling, k)) for generate in generates.values()]
            assert len({got.token_ids for got in answers}) == 1
            stats = [got.completion.stats for got in answers]
            assert len({(s.rounds, s.drafted, s.accepted) for s in stats}) == 1
            again = await answer(generates["worker"], asked(sampling, k))
            assert again.token_ids == answers[0].token_ids
            if draft == "noisy" and k > 1:
                assert 0 < stats[0].accepted < stats[0].drafted


@pytest.mark.thorough
async def test_the_output_over_the_wire_follows_the_targets_law() -> None:
    """Chi-square over seeds of three tokens, each of which can be three, drafted two at a time by another model."""
    sampling, seeds = SamplingParams(temperature=3.0, top_k=3), 700

    def alone(context: Sequence[int]) -> np.ndarray:
        return reference_law(toy_logits([*PROMPT, *context[3:]], ToyConfig()).tolist(), sampling)

    async with target_site() as target, distributed(target.address, "miss=0.5") as (generator, _):
        requests = [asked(replace(sampling, seed=seed), 2, 3) for seed in range(seeds)]
        said = []
        for start in range(0, seeds, 4):
            answers = await asyncio.gather(*(answer(generator.generate, r) for r in requests[start : start + 4]))
            said += [got.token_ids for got in answers]
        outputs = said
    law = chain_law(alone, 3, frozenset())
    assert set(outputs) <= set(law)
    counts = np.array([outputs.count(tokens) for tokens in law])
    assert chi_square_p_value(counts, np.array(list(law.values()))) > 1e-3


async def test_copies_of_the_prompt_do_not_depend_on_time() -> None:
    """The target sees one token only and so runs into a cycle; its steps take no longer for more tokens."""
    asking = replace(asked(replace(FREE, temperature=0.7, seed=11), 3, 100), drafts=Drafts.LOOKUP)
    target = toy(ToyConfig(step_seconds=0.002), kind=ForgetfulRunner)
    async with fused_site(target, None, 3, "hybrid") as site, site.client() as client:
        answers = [await answer(client.generate, asking) for _ in range(3)]
    assert len({got.token_ids for got in answers}) == 1 and END not in answers[0].token_ids[:-1]
    assert len({got.completion.stats.drafted for got in answers}) == 1 and answers[0].completion.stats.drafted > 10


async def test_lost_replies_and_forgotten_sessions_change_no_token() -> None:
    calls = 0

    async def fault(inner: Any, request: Any, context: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            await forget(inner, SessionKey(ANONYMOUS, request.session_id))
        reply = await inner.Verify(request, context)
        if calls % 3 == 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return reply

    async with target_site() as site:
        async with distributed(site.address, "miss=0.3") as (generator, _):
            undisturbed = await answer(generator.generate, asked(FREE, 3, 40))
        async with in_front(site, Verify=fault) as address, distributed(address, "miss=0.3") as (generator, _):
            got = await answer(generator.generate, asked(FREE, 3, 40))
        assert calls > got.completion.stats.rounds
        assert got.token_ids == undisturbed.token_ids
        assert got.completion.stats.accepted == undisturbed.completion.stats.accepted


def drafted(tokens: Sequence[int], k: int, sampling: SamplingParams, salt: int) -> tuple[list[int], list[Any]]:
    """k tokens of a toy draft model, and what each was drawn from, as messages."""
    context, sent = list(tokens), []
    for _ in range(k):
        token, distribution = draft_token(toy_logits(context, ToyConfig(salt)), sampling, len(context))
        context.append(token)
        sent.append(distribution)
    return context[len(tokens) :], distributions_to_wire(sent)


def opens(name: str = "s", **rest: Any) -> Any:
    return opening(name, PROMPT, FREE, **rest)


def drawn(draft: Sequence[int], distributions: Sequence[Any] = (), name: str = "s") -> Any:
    return verifying(PROMPT, draft, name, distributions=distributions)


async def test_a_rejected_round_is_replayed_and_decided_the_same_on_another_replica() -> None:
    draft, sent = drafted(PROMPT, 4, FREE, salt=9)
    async with target_site() as site, raw_stub(site.address) as target:
        opened = await target.OpenSession(opens(rule=REJECTION))
        assert opened.rule == REJECTION
        first = await target.Verify(drawn(draft, sent))
        assert first.accepted < 4 and first.token_ids[first.accepted] != draft[first.accepted]
        steps = site.engine.batcher.steps
        for again in (drawn(draft, sent), drawn(draft), drawn([])):
            reply = await target.Verify(again)
            assert reply.replayed and list(reply.token_ids) == list(first.token_ids)
        assert site.engine.batcher.steps == steps
        await target.OpenSession(opens("other", rule=REJECTION))
        fresh = await target.Verify(drawn(draft, sent, "other"))
        assert not fresh.replayed and list(fresh.token_ids) == list(first.token_ids)


async def test_the_reply_says_which_rule_holds_and_unspecified_is_agreement() -> None:
    async with target_site() as site, raw_stub(site.address) as target:
        for asked_for, holds in (
            (0, generation_pb2.VERIFICATION_RULE_AGREEMENT),
            (1, generation_pb2.VERIFICATION_RULE_AGREEMENT),
            (2, REJECTION),
        ):
            assert (await target.OpenSession(opens(f"s{asked_for}", rule=asked_for))).rule == holds
        assert (await target.OpenSession(opens("s0", rule=1))).rule == 1
        for name, other in (("s0", 2), ("s2", 1), ("s2", 0)):
            with pytest.raises(grpc.RpcError, match="is open with the rule") as caught:
                await target.OpenSession(opens(name, rule=other))
            assert caught.value.code().name == "ALREADY_EXISTS"


ONE = generation_pb2.SparseDistribution(token_ids=[5, 7], weights=[1.0, 0.5])
WRONG = {
    "one too few": ([5, 7], [ONE], "distributions: 1 for 2 draft tokens"),
    "one too many": ([5], [ONE, ONE], "distributions: 2 for 1 draft tokens"),
    "outside the support": ([5, 6], [ONE, ONE], r"draft_tokens: token 6 at 1 is not in the support"),
    "descending": ([5], [generation_pb2.SparseDistribution(token_ids=[7, 5], weights=[1, 1])], "5 follows 7"),
    "twice": ([5], [generation_pb2.SparseDistribution(token_ids=[5, 5], weights=[1, 1])], "5 follows 5"),
    "outside the vocabulary": (
        [5],
        [generation_pb2.SparseDistribution(token_ids=[5, 258], weights=[1, 1])],
        r"distributions\[0\].token_ids: token id 258 is outside the vocabulary of 258",
    ),
    "weight 0": ([5], [generation_pb2.SparseDistribution(token_ids=[5], weights=[0])], r"weights: 0.0 is not"),
    "weight NaN": ([5], [generation_pb2.SparseDistribution(token_ids=[5], weights=[float("nan")])], "weights: nan"),
    "weight inf": ([5], [generation_pb2.SparseDistribution(token_ids=[5], weights=[float("inf")])], "weights: inf"),
    "fewer weights": ([5], [generation_pb2.SparseDistribution(token_ids=[5, 6], weights=[1])], "weights: 1 for 2"),
    "empty": ([5], [generation_pb2.SparseDistribution()], r"distributions\[0\].token_ids: empty"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_distributions_that_cannot_be_are_refused_and_the_session_lives_on(case: str) -> None:
    draft, distributions, said = WRONG[case]
    async with target_site() as site, raw_stub(site.address) as target:
        await target.OpenSession(opens(rule=REJECTION))
        with pytest.raises(grpc.RpcError, match=said) as caught:
            await target.Verify(drawn(draft, distributions))
        assert caught.value.code().name == "INVALID_ARGUMENT"
        assert (await target.Verify(drawn([5], [ONE]))).committed_length > len(PROMPT)


@pytest.mark.parametrize(("replied", "says"), [(0, "nothing"), (1, "agreement"), (7, "7")])
async def test_a_server_that_verifies_by_another_rule_is_not_gone_on_with(replied: int, says: str) -> None:
    async def old(inner: Any, request: Any, context: Any) -> Any:
        request.rule = 0
        reply = await inner.OpenSession(request, context)
        reply.rule = replied
        return reply

    async with target_site() as site, in_front(site, OpenSession=old) as address:
        async with distributed(address, "miss=0.3") as (generator, _):
            with pytest.raises(TandemError, match=f"does not verify by rejection, .* reports {says}") as caught:
                await answer(generator.generate, asked(FREE))
            assert caught.value.code == "FAILED_PRECONDITION"
            if replied < 2:
                got = await answer(generator.generate, asked(SAMPLED, rule=Rule.AGREEMENT))
                assert got.token_ids == oracle(PROMPT, SAMPLED, 24)
        assert site.free == 4
