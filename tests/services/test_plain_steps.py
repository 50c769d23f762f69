"""Plain steps that a round asks for: one reply for several, exact, bounded, and replayed as one."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tandem.rpc.verify_stream import RemoteVerifier
from tandem.rpc.wire_runs import STEPS_TOGETHER
from tandem.rpc.wire_verdicts import VerdictBounds, answer_from_wire, check_opened
from tandem.runners.toy import ToyConfig
from tandem.services.verify_runs import MAX_STOP_TOKENS, committed
from tandem.speculation.length import FixedLength, LengthPlan
from tandem.speculation.pipeline import Answer
from tandem.speculation.types import Draft, InvalidField, Request, Rule, Verdict
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_features import head_config
from tests.services.test_target_verifier import PROMPT, opening, verifying
from tests.support import GREEDY, SAMPLED, answer, distributed, ids, oracle, raw_stub, run, target_site, toy

TRUTH = {sampling: list(oracle(PROMPT, sampling, 60, past_the_end=True)) for sampling in (GREEDY, SAMPLED)}


def steps_of(reply: Any) -> list[Any]:
    return [reply, *reply.next_steps]


def said(reply: Any) -> list[int]:
    return [token for step in steps_of(reply) for token in step.token_ids]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_round_without_a_draft_takes_the_plain_steps_that_it_asks_for_and_one_reply_holds_all(sampling: Any) -> None:
    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening(sampling=sampling, report_margins=True, logprobs=2))
            reply = await target.Verify(verifying(PROMPT, plain_steps=6))
            assert said(reply) == TRUTH[sampling][:7]
            told = [
                (s.committed_length, s.accepted, len(s.margins), len(s.logprobs), s.replayed) for s in steps_of(reply)
            ]
            assert told == [(len(PROMPT) + n, 0, 1, 1, False) for n in range(1, 8)]
            assert reply.server_seconds >= sum(step.compute_seconds for step in steps_of(reply)) > 0
            reply = await target.Verify(verifying(PROMPT + said(reply)))
            assert said(reply) == TRUTH[sampling][7:8]
            closed = await target.CloseSession(pb.CloseSessionRequest(session_id="s"))
            assert (closed.steps, closed.committed_length) == (8, len(PROMPT) + 8)

    run(test())


def test_a_stop_token_ends_the_steps_and_so_do_the_most_of_a_reply_and_the_sessions_length() -> None:
    text = TRUTH[GREEDY]

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            stops = [text[4]]
            reply = await target.Verify(verifying(PROMPT, plain_steps=9, stop_token_ids=stops))
            assert said(reply) == text[: text.index(text[4]) + 1]
            await target.OpenSession(opening("long"))
            reply = await target.Verify(verifying(PROMPT, name="long", plain_steps=2**32 - 1))
            assert said(reply) == text[:STEPS_TOGETHER]
            await target.OpenSession(opening("short", max_total_tokens=len(PROMPT) + 3))
            reply = await target.Verify(verifying(PROMPT, name="short", plain_steps=9))
            assert said(reply) == text[:3]
            await target.OpenSession(opening("drafted"))
            reply = await target.Verify(verifying(PROMPT, text[:2], name="drafted", plain_steps=9))
            assert (said(reply), reply.accepted) == (text[:3], 2)

    run(test())


def test_too_many_stop_tokens_or_one_outside_the_vocabulary_are_refused_and_nothing_is_committed() -> None:
    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            too_many, outside = [1] * (MAX_STOP_TOKENS + 1), [10**6]
            for stops, why in ((too_many, "257 are above 256"), (outside, "token id 1000000 is outside the vocab")):
                with pytest.raises(grpc.RpcError) as refused:
                    await target.Verify(verifying(PROMPT, plain_steps=2, stop_token_ids=stops))
                assert refused.value.code().name == "INVALID_ARGUMENT"
                assert f"stop_token_ids: {why}" in refused.value.details()
            assert said(await target.Verify(verifying(PROMPT))) == TRUTH[GREEDY][:1]

    run(test())


def test_a_step_that_fails_ends_the_others_and_what_they_committed_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 4):
            raise InvalidField("structure", "it has ended")
        return await committed(*arguments)

    monkeypatch.setattr("tandem.services.verify_runs.committed", failing)

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening())
            with pytest.raises(grpc.RpcError) as refused:
                await target.Verify(verifying(PROMPT, plain_steps=5))
            assert "structure: it has ended" in refused.value.details()
            assert said(await target.Verify(verifying(PROMPT, plain_steps=5))) == TRUTH[GREEDY][:2]
            reply = await target.Verify(verifying(PROMPT + TRUTH[GREEDY][:2], plain_steps=5))
            assert said(reply) == TRUTH[GREEDY][2:8]

    run(test())


def test_a_round_sent_again_is_answered_with_the_same_steps_and_a_client_may_go_back_into_them() -> None:
    """G2 and G5: what several steps committed is one round."""

    async def test() -> None:
        async with target_site() as site, raw_stub(site.address) as target:
            await target.OpenSession(opening(sampling=SAMPLED))
            asked = verifying(PROMPT, plain_steps=4)
            first, again = await target.Verify(asked), await target.Verify(asked)
            assert said(again) == said(first) == TRUTH[SAMPLED][:5]
            assert all(step.replayed for step in steps_of(again))
            reopened = await target.OpenSession(opening(sampling=SAMPLED))  # its client has read none of them
            assert reopened.committed_length == len(PROMPT) + 5
            assert said(await target.Verify(asked)) == said(first)
            within = PROMPT + TRUTH[SAMPLED][:2]
            await target.OpenSession(opening(sampling=SAMPLED, prefix=within))
            assert said(await target.Verify(verifying(within, plain_steps=3))) == TRUTH[SAMPLED][2:6]

    run(test())


class Asked:
    """Notes the plain steps that clients ask for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        send = RemoteVerifier.send

        def noting(
            verifier: RemoteVerifier, base_length: int, last_token: int, draft: Draft, plain_steps: int = 0
        ) -> Any:
            self.steps.append(plain_steps)
            return send(verifier, base_length, last_token, draft, plain_steps)

        monkeypatch.setattr(RemoteVerifier, "send", noting)


def test_rounds_without_drafts_share_round_trips_from_the_second_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    monkeypatch.setattr("tandem.rpc.verify_stream.TOGETHER", 1.0)  # however late steps end on a busy machine

    async def test() -> None:
        async with (
            target_site(toy(ToyConfig(step_seconds=0.002))) as site,
            distributed(site.address, k=0) as (generator, _),
        ):
            for sampling in (GREEDY, SAMPLED):
                asked.steps.clear()
                answered = await answer(generator.generate, ids(PROMPT, 40, sampling=sampling))
                assert answered.token_ids == oracle(PROMPT, sampling, 40)
                end = answered.completion
                assert end.stats.rounds == end.output_tokens == 40
                assert asked.steps[0] == 0
                assert 2 <= len(asked.steps) < end.output_tokens / 2
                assert max(asked.steps) < STEPS_TOGETHER
            assert site.free == 4

    run(test())


def test_a_head_elsewhere_gets_the_features_of_steps_that_share_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is always right with all of them in place."""
    asked = Asked(monkeypatch)
    monkeypatch.setattr("tandem.rpc.verify_stream.TOGETHER", 0.05)  # some five steps

    def choose(lengths: FixedLength, remaining: int) -> LengthPlan:
        k = 0 if 20 < remaining < 50 else min(lengths.length, remaining - 1)
        return LengthPlan(k, k)

    monkeypatch.setattr(FixedLength, "choose", choose)

    async def test() -> None:
        async with (
            target_site(toy(ToyConfig(step_seconds=0.01), max_length=200), features=()) as site,
            distributed(site.address, config=head_config()) as (generator, _),
        ):
            answered = await answer(generator.generate, ids(PROMPT, 80))
            stats = answered.completion.stats
            assert answered.token_ids == oracle(PROMPT, GREEDY, 80)
            assert stats.accepted == stats.drafted > 30  # before those steps and after them
            assert max(asked.steps) > 0

    run(test())


def test_steps_that_take_longer_than_readers_notice_are_asked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)

    async def test() -> None:
        async with (
            target_site(toy(ToyConfig(step_seconds=0.02))) as site,
            distributed(site.address, k=0) as (generator, _),
        ):
            await answer(generator.generate, ids(PROMPT, 5))
            assert asked.steps == [0] * 5

    run(test())


@pytest.mark.parametrize(
    "request_fields",
    [{"stop_strings": ("no such text",)}, {"rule": Rule.REJECTION, "sampling": SAMPLED}],
    ids=["stop strings", "rejection"],
)
def test_where_text_or_drafts_decide_each_round_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, request_fields: dict[str, Any]
) -> None:
    asked = Asked(monkeypatch)

    async def test() -> None:
        async with target_site() as site, distributed(site.address, k=0) as (generator, _):
            await answer(generator.generate, ids(PROMPT, 12, **request_fields))
            assert asked.steps == [0] * 12

    run(test())


def test_no_more_is_asked_for_than_the_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)

    async def test() -> None:
        async with target_site() as site, distributed(site.address, k=0) as (generator, _):
            end = (await answer(generator.generate, ids(PROMPT, 7))).completion
            assert sum(asked.steps) + len(asked.steps) == end.output_tokens == 7
            assert site.engine.batcher.steps >= 7

    run(test())


def reply(*lengths: int, **rest: Any) -> pb.VerifyResponse:
    first, *after = (pb.VerifyResponse(committed_length=length, token_ids=[7]) for length in lengths)
    first.next_steps.extend(after)
    first.MergeFrom(pb.VerifyResponse(**rest))
    return first


BOUNDS = VerdictBounds(256, 5, Request())


def converted(answered: pb.VerifyResponse, plain_steps: int) -> Answer:
    asked = pb.VerifyRequest(base_length=3, last_token=1, plain_steps=plain_steps)
    return answer_from_wire(answered, asked, BOUNDS, 1.0)


def test_one_verdict_has_the_tokens_and_seconds_of_all_steps() -> None:
    sent = reply(4, 5, 6, compute_seconds=0.25)
    for step in sent.next_steps:
        step.compute_seconds = 0.125
    found = converted(sent, 2)
    assert found.verdict == Verdict((7, 7, 7), 0, 0.0, 0.5, rows=1, steps=3)
    assert found.committed_length == 6
    assert converted(reply(4, 5, 6, replayed=True), 0).verdict is not None  # of a round that asked for others


def test_a_session_that_is_opened_again_may_hold_all_steps_of_a_reply_that_was_lost_and_no_more() -> None:
    asked = pb.OpenSessionRequest(prefix=PROMPT)
    most = len(PROMPT) + STEPS_TOGETHER
    check_opened(asked, pb.OpenSessionResponse(committed_length=most), 5, None)
    with pytest.raises(InvalidField, match=f"committed_length: {most + 1} is outside"):
        check_opened(asked, pb.OpenSessionResponse(committed_length=most + 1), 5, None)


def with_drafts() -> pb.VerifyResponse:
    wrong = reply(4, 6)
    wrong.next_steps[0].accepted, wrong.next_steps[0].token_ids[:] = 1, [7, 7]
    return wrong


@pytest.mark.parametrize(
    ("sent", "plain_steps", "why"),
    [
        (reply(4, 5, 6), 1, "next_steps: 2 is outside 0 to 1"),
        (reply(*range(4, 5 + STEPS_TOGETHER)), 40, "next_steps: 32 are above 31"),
        (reply(4, 6), 2, "committed_length: 6 after 4 tokens and 1 more"),
        (with_drafts(), 2, "accepted: 1 is outside 0 to 0"),
    ],
    ids=["more than asked for", "more than may be", "a gap", "a draft"],
)
def test_steps_that_nobody_asked_for_or_that_do_not_follow_break_the_contract(
    sent: pb.VerifyResponse, plain_steps: int, why: str
) -> None:
    with pytest.raises(InvalidField) as refused:
        converted(sent, plain_steps)
    assert str(refused.value) == why


def test_a_target_that_knows_no_plain_steps_is_used_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)

    def forget(request: Any, vocab_size: int) -> None:
        request.ClearField("plain_steps")

    monkeypatch.setattr("tandem.services.target_verifier.check_stops", forget)

    async def test() -> None:
        async with target_site() as site, distributed(site.address, k=0) as (generator, _):
            answered = await answer(generator.generate, ids(PROMPT, 20))
            assert answered.token_ids == oracle(PROMPT, GREEDY, 20)
            assert len(asked.steps) == 20 and max(asked.steps) > 0

    run(test())
