"""Propose and EndProposals over the wire: what a DraftWorker remembers of a session, and when it lets go of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT
from tandem.rpc.errors import TandemError
from tandem.runners.toy import ToyRunner
from tandem.speculation.types import SamplingParams
from tandem.v1 import draft_worker_pb2 as pb
from tests.gate import Gate
from tests.services.test_errors import Refusal, refusal
from tests.support import (
    GREEDY,
    SAMPLED,
    Site,
    answer,
    ids,
    oracle,
    raw_stub,
    run,
    target_site,
    until,
    worker_site,
)

PROMPT = list(b"the prompt, long enough for three chunks of prefill")


def asking(
    tokens: Sequence[int], known: int = 0, k: int = 4, name: str = "s", sampling: SamplingParams = GREEDY, **rest: Any
) -> pb.ProposeRequest:
    """What a caller sends that holds `tokens` and believes that the worker knows the first `known` of them."""
    if not known:
        rest = {"sampling": wire.sampling_to_wire(sampling), "tokenizer_sha256": "toy"} | rest
    return pb.ProposeRequest(session_id=name, known_length=known, tokens=tokens[known:], speculation_length=k, **rest)


def ending(name: str = "s") -> pb.EndProposalsRequest:
    return pb.EndProposalsRequest(session_id=name)


def idle(site: Site) -> bool:
    return len(site.proposals.sessions) == 0 and site.free == 4


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_session_sends_only_what_is_new_and_gets_the_models_draws(sampling: SamplingParams) -> None:
    truth = list(oracle(PROMPT, sampling, 12, past_the_end=True))

    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            reply = await worker.Propose(asking(PROMPT, sampling=sampling))
            assert list(reply.draft_tokens) == truth[:4]
            assert list(reply.proposed_by) == ["model"] * 4
            assert not reply.unknown and reply.server_seconds >= reply.compute_seconds > 0
            for held, now in ((0, 1), (1, 6), (6, 8)):
                known = len(PROMPT) + held
                reply = await worker.Propose(asking(PROMPT + truth[:now], known, 2))
                assert list(reply.draft_tokens) == truth[now : now + 2]
            assert site.free == 3
            assert (await worker.EndProposals(ending())).ended
            assert not (await worker.EndProposals(ending())).ended
            assert idle(site)

    run(test())


def test_ngram_lookup_proposes_without_a_model_or_a_slot() -> None:
    async def test() -> None:
        async with worker_site(None, None) as site, raw_stub(site.address, DRAFT) as worker:
            reply = await worker.Propose(asking(list(b"abcdeabc")))
            assert (bytes(reply.draft_tokens), set(reply.proposed_by)) == (b"deab", {"ngram"})
            reply = await worker.Propose(asking(list(b"abcdeabcx"), 8))
            assert not reply.draft_tokens

    run(test())


@pytest.mark.parametrize("draft", ["", "miss=0.3", None])
def test_the_same_call_again_gives_the_same_proposal(draft: str | None) -> None:
    tokens = list(b"abcabcabcabc")

    async def test() -> None:
        async with worker_site(None, draft) as site, raw_stub(site.address, DRAFT) as worker:
            for known, until_ in ((0, 6), (6, 7), (7, 12)):
                replies = [await worker.Propose(asking(tokens[:until_], known)) for _ in range(3)]
                assert len({tuple(reply.draft_tokens) for reply in replies}) == 1
                assert replies[0].draft_tokens

    run(test())


@pytest.mark.parametrize("draft", ["", None])
def test_a_round_that_was_rolled_back_is_forgotten(draft: str | None) -> None:
    async def test() -> None:
        async with worker_site(None, draft) as site, raw_stub(site.address, DRAFT) as worker:
            await worker.Propose(asking(list(b"abcdabcdabcd")))
            for tokens, known in ((b"abcdab", 6), (b"abcdabxabx", 6), (b"abca", 3), (b"zzabzz", 0)):
                reply = await worker.Propose(asking(list(tokens), known))
                alone = await worker.Propose(asking(list(tokens), name=f"alone {tokens!r}"))
                assert list(reply.draft_tokens) == list(alone.draft_tokens)
                await worker.EndProposals(ending(f"alone {tokens!r}"))

    run(test())


def test_what_is_not_held_is_unknown_and_nothing_is_taken_for_it() -> None:
    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            assert (await worker.Propose(asking(PROMPT, 3))).unknown
            assert idle(site)
            await worker.Propose(asking(PROMPT))
            reply = await worker.Propose(asking([*PROMPT, 1, 2], len(PROMPT) + 1))
            assert reply.unknown and not reply.draft_tokens
            again = await worker.Propose(asking([*PROMPT, 1, 2]))
            assert list(again.draft_tokens) == list(oracle([*PROMPT, 1, 2], GREEDY, 4, past_the_end=True))

    run(test())


def test_a_length_of_zero_only_processes_the_prompt() -> None:
    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            assert not (await worker.Propose(asking(PROMPT, k=0))).draft_tokens
            prefilled = site.engine.batcher.steps
            assert (await worker.Propose(asking(PROMPT, len(PROMPT)))).draft_tokens
            assert site.engine.batcher.steps == prefilled + 1

    run(test())


def test_a_sequence_that_leaves_no_room_gets_what_fits() -> None:
    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            assert len((await worker.Propose(asking([1] * 158))).draft_tokens) == 2
            assert not (await worker.Propose(asking([1] * 160, 158))).draft_tokens

    run(test())


# --- bad input ---


@pytest.mark.parametrize(
    ("request_", "code", "names"),
    [
        (asking([1, 258]), "INVALID_ARGUMENT", ("tokens", "258")),
        (asking([1], k=6), "INVALID_ARGUMENT", ("speculation_length", "6", "5")),
        (asking([1], name=""), "INVALID_ARGUMENT", ("session_id", "128")),
        (asking([1], name="x" * 129), "INVALID_ARGUMENT", ("session_id", "129", "128")),
        (asking([]), "INVALID_ARGUMENT", ("tokens", "empty")),
        (pb.ProposeRequest(session_id="s", tokens=[1]), "INVALID_ARGUMENT", ("sampling", "missing")),
        (asking([1], sampling=GREEDY, tokenizer_sha256="another"), "FAILED_PRECONDITION", ("another", "toy")),
        (asking([1] * 161), "OUT_OF_RANGE", ("161", "160")),
        (asking([1] * 161, 100), "OUT_OF_RANGE", ("100", "61", "160")),
    ],
)
def test_bad_input_names_field_and_limit_and_takes_nothing(
    request_: pb.ProposeRequest, code: str, names: tuple[str, ...]
) -> None:
    async def test() -> Refusal:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            refused = await refusal(worker.Propose(request_))
            assert idle(site) and site.engine.batcher.steps == 0
            return refused

    refused = run(test())
    assert refused.code == code
    assert all(name in refused.message for name in names)
    if code == "INVALID_ARGUMENT":
        assert refused.field == names[0]


def test_bad_sampling_and_another_sampling_are_refused_and_the_session_lives_on() -> None:
    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            bad = asking(PROMPT)
            bad.sampling.temperature = -1
            refused = await refusal(worker.Propose(bad))
            assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "temperature")
            assert idle(site)
            await worker.Propose(asking(PROMPT))
            assert (await refusal(worker.Propose(asking(PROMPT, sampling=SAMPLED)))).code == "ALREADY_EXISTS"
            assert (await worker.Propose(asking(PROMPT, len(PROMPT)))).draft_tokens

    run(test())


def test_a_worker_without_a_free_slot_says_when_to_come_again() -> None:
    async def test() -> None:
        async with worker_site(None, slots=1) as site, raw_stub(site.address, DRAFT) as worker:
            await worker.Propose(asking(PROMPT))
            refused = await refusal(worker.Propose(asking(PROMPT, name="other")))
            assert (refused.code, refused.reason, refused.retry) == ("RESOURCE_EXHAUSTED", "NO_SLOT", 0.1)
            assert len(site.proposals.sessions) == 1
            await worker.EndProposals(ending())
            assert (await worker.Propose(asking(PROMPT, name="other"))).draft_tokens

    run(test())


# --- leases, cancellation, ownership ---


def test_a_lease_that_runs_out_frees_the_slot_and_the_session_is_unknown() -> None:
    async def test() -> None:
        async with worker_site(None, lease_seconds=0.2) as site, raw_stub(site.address, DRAFT) as worker:
            await worker.Propose(asking(PROMPT))
            await until(lambda: idle(site))
            assert (await worker.Propose(asking(PROMPT, 5))).unknown
            assert (await worker.Propose(asking(PROMPT))).draft_tokens

    run(test())


def test_a_cancelled_first_call_leaves_no_slot_behind() -> None:
    async def test() -> None:
        async with worker_site(None, "step=0.05") as site, raw_stub(site.address, DRAFT) as worker:
            call = worker.Propose(asking([1] * 150))
            await until(lambda: site.free == 3)
            call.cancel()
            await until(lambda: idle(site))

    run(test())


def test_a_call_that_waited_for_a_cancelled_first_one_opens_the_session_itself() -> None:
    async def test() -> None:
        gate = Gate()
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            gate.guards(site.engine.runner)
            gate.close()
            first = worker.Propose(asking([1] * 150))
            await until(lambda: site.free == 3)
            second = asyncio.ensure_future(worker.Propose(asking(PROMPT)))
            await until(lambda: next(iter(site.proposals.sessions)).in_use == 2)
            first.cancel()
            await until(lambda: next(iter(site.proposals.sessions)).in_use == 1)  # the server has heard of it
            gate.open()
            assert list((await second).draft_tokens) == list(oracle(PROMPT, GREEDY, 4, past_the_end=True))
            assert site.free == 3
            await worker.EndProposals(ending())
            assert idle(site)

    run(test())


def test_a_session_that_ends_while_a_round_runs_is_freed_after_it() -> None:
    async def test() -> None:
        gate = Gate()
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            gate.guards(site.engine.runner)
            gate.close()
            running = asyncio.ensure_future(worker.Propose(asking(PROMPT)))
            await until(lambda: site.free == 3)
            waiting = asyncio.ensure_future(refusal(worker.Propose(asking(PROMPT, k=1))))
            await until(lambda: next(iter(site.proposals.sessions)).in_use == 2)
            assert (await worker.EndProposals(ending())).ended
            assert site.free == 3
            gate.open()
            assert len((await running).draft_tokens) == 4
            assert (await waiting).code == "NOT_FOUND"
            await until(lambda: idle(site))

    run(test())


def test_rounds_of_a_session_are_in_order_and_sessions_share_steps() -> None:
    truth = list(oracle(PROMPT, GREEDY, 12, past_the_end=True))

    async def test() -> None:
        async with worker_site(None, "step=0.01") as site, raw_stub(site.address, DRAFT) as worker:
            for name in ("a", "b", "c"):
                await worker.Propose(asking(PROMPT, k=0, name=name))
            before = site.engine.batcher.steps

            async def rounds(name: str) -> None:
                for n in (1, 2, 3):
                    call = asking(PROMPT + truth[:n], len(PROMPT) + n - 1, name=name)
                    for reply in await asyncio.gather(worker.Propose(call), worker.Propose(call)):
                        assert list(reply.draft_tokens) == truth[n : n + 4]

            await asyncio.gather(*(rounds(name) for name in ("a", "b", "c")))
            assert site.engine.batcher.steps - before < 18

    run(test())


def test_a_step_that_fails_is_an_error_of_that_call_and_leaves_no_slot_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            with monkeypatch.context() as broken:
                broken.setattr(ToyRunner, "propose", lambda self, rows: 1 / 0)
                assert (await refusal(worker.Propose(asking(PROMPT, name="first")))).reason == "ENGINE_LOST"
                assert idle(site)
            assert (await worker.Propose(asking(PROMPT))).draft_tokens

    run(test())


def test_a_drained_worker_refuses_new_sessions_and_finishes_running_ones() -> None:
    async def test() -> None:
        async with worker_site(None) as site, raw_stub(site.address, DRAFT) as worker:
            await worker.Propose(asking(PROMPT))
            site.lifecycle.accepting = False
            assert (await refusal(worker.Propose(asking(PROMPT, name="new")))).code == "UNAVAILABLE"
            assert (await worker.Propose(asking(PROMPT, len(PROMPT)))).draft_tokens

    run(test())


# --- with and without a target ---


def test_a_worker_that_only_proposes_says_what_drafts_and_generates_nothing() -> None:
    async def test() -> None:
        async with worker_site(None, "miss=0.1") as site, site.client() as client:
            info = await client.model_info()
            assert (info.model_name, info.draft_name, info.tokenizer_sha256) == ("", "toy", "toy")
            assert (info.vocab_size, info.max_sequence_length, info.max_speculation_length) == (258, 160, 5)
            with pytest.raises(TandemError, match="only proposes") as caught:
                await answer(client.generate, ids(b"x"))
            assert caught.value.code == "UNIMPLEMENTED"

    run(test())


def test_one_worker_generates_and_proposes_with_the_same_slots() -> None:
    async def test() -> None:
        async with (
            target_site() as target,
            worker_site(target.address, "miss=0.3", slots=2) as site,
            site.client() as client,
            raw_stub(site.address, DRAFT) as worker,
        ):
            await worker.Propose(asking(PROMPT))
            answers = await asyncio.gather(*(answer(client.generate, ids([65 + i], 12)) for i in range(3)))
            assert [a.token_ids for a in answers] == [oracle([65 + i], GREEDY, 12) for i in range(3)]
            assert len((await worker.Propose(asking(PROMPT, len(PROMPT)))).draft_tokens) == 4
            assert site.free == 1
            await worker.EndProposals(ending())
            assert site.free == 2

    run(test())
