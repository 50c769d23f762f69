"""What one caller may have at a time, and how much it may send."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import grpc
import pytest

from tandem.rpc.errors import TandemError, from_rpc
from tandem.services.security.config import Security
from tandem.services.security.limits import LimitReached, ServerLimits
from tandem.services.security.tokens import AcceptedTokens
from tandem.speculation.types import GenerationRequest, InvalidField
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.certificates import token_file
from tests.services.test_identity import TOKENS, ByToken, opening, proposing
from tests.support import DRAFT, HANG, TARGET, answer, ids, raw_stub, run, target_site, toy, until, worker_site
from tests.toy import ToyRunner, ToyTokenizer

PROMPT = b"many at once"


def limited(tmp_path, **limits: int) -> tuple[ByToken, Security]:
    callers = ByToken(tmp_path)
    return callers, Security(tokens=callers.security.tokens, limits=ServerLimits(**limits))


async def refusal(call: Any) -> TandemError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc(refused.value)


def test_one_caller_has_so_many_sessions_and_another_its_own(tmp_path):
    callers, security = limited(tmp_path, max_sessions_per_identity=2)

    async def test():
        async with (
            target_site(security=security) as site,
            raw_stub(site.address, TARGET, callers.credentials("alice")) as alice,
            raw_stub(site.address, TARGET, callers.credentials("bob")) as bob,
        ):
            for name in ("a", "b"):
                await alice.OpenSession(opening(name))
            refused = await refusal(alice.OpenSession(opening("c")))
            await alice.OpenSession(opening("a"))  # one that is open is no other
            await bob.OpenSession(opening("a"))
            await alice.CloseSession(pb.CloseSessionRequest(session_id="b"))
            await alice.OpenSession(opening("c"))
            return refused

    refused = run(test())
    assert (refused.code, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", 0.1)
    assert refused.message == "max_sessions_per_identity: 2 of your sessions are open, the limit is 2"


def test_proposals_are_sessions_too(tmp_path):
    callers, security = limited(tmp_path, max_sessions_per_identity=1)

    async def test():
        async with (
            worker_site(None, security=security) as site,
            raw_stub(site.address, DRAFT, callers.credentials("alice")) as alice,
        ):
            open_stream = alice.Propose()
            await open_stream.write(proposing(PROMPT))
            await open_stream.read()
            return await refusal(alice.Propose(iter([proposing(PROMPT)])).read())

    refused = run(test())
    assert (refused.code, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", 0.1)


class Gated(ToyRunner):
    """Computes nothing before it is let."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open = threading.Event()

    def logits(self, slot: int, position: int) -> Any:
        assert self.open.wait(HANG)
        return super().logits(slot, position)


def test_one_caller_has_so_many_requests_under_way_and_another_its_own(tmp_path):
    callers, security = limited(tmp_path, max_requests_per_identity=1)
    runner = toy(kind=Gated)
    assert isinstance(runner, Gated)

    async def test():
        async with (
            target_site(runner, security=security) as site,
            site.client(callers.credentials("alice")) as alice,
            site.client(callers.credentials("bob")) as bob,
        ):
            assert site.method
            served = [asyncio.create_task(answer(each.generate, ids(PROMPT, 4))) for each in (alice, bob)]
            await until(lambda: site.method.under_way == 2)
            with pytest.raises(TandemError) as refused:
                await answer(alice.generate, ids(PROMPT, 4))
            runner.open.set()
            await asyncio.gather(*served)
            await until(lambda: not site.method.under_way)
            await answer(alice.generate, ids(PROMPT, 4))
        return refused.value

    refused = run(test())
    assert (refused.code, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", 0.1)
    assert refused.message == "max_requests_per_identity: 1 of your requests are running, the limit is 1"


def test_what_ended_counts_no_more():
    running = ServerLimits(max_requests_per_identity=2).running()
    with running.one("alice"), running.one("alice"), running.one("bob"), pytest.raises(LimitReached):
        running.one("alice").__enter__()
    with contextlib.suppress(KeyError), running.one("alice"):
        raise KeyError("a request that fails")
    with running.one("alice"), running.one("alice"):
        pass
    assert not running._of, "nothing is remembered of callers who left"


class NeverTokenizes(ToyTokenizer):
    def encode(self, text: str, chat: bool) -> list[int]:
        raise AssertionError("the text is too long to be looked at")


@pytest.mark.parametrize("most", [None, 100])
def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(most, monkeypatch):
    limits = ServerLimits(max_prompt_bytes=most)
    monkeypatch.setattr(ToyTokenizer, "encode", NeverTokenizes.encode)
    length = (most or 64 * 160) + 1

    async def test():
        async with target_site(security=Security(limits=limits)) as site, site.client() as client:
            with pytest.raises(TandemError) as refused:
                await answer(client.generate, GenerationRequest(text="é" * (length // 2) + "x"))
        return refused.value.code, refused.value.message

    code, message = run(test())
    assert code == "OUT_OF_RANGE"
    assert message == f"the prompt has {length} bytes and this server takes {length - 1} (max_prompt_bytes)"


def test_more_token_ids_than_the_sequence_holds_are_refused_before_they_are_looked_at():
    async def test():
        async with target_site() as site, site.client() as client:
            with pytest.raises(TandemError) as refused:
                await answer(client.generate, ids([10**6] * 161, 1))  # no such token either
        return refused.value.code, refused.value.message

    assert run(test()) == (
        "OUT_OF_RANGE",
        "the prompt has 161 tokens and the sequence length is 160: no room to generate",
    )


def test_a_message_that_is_too_large_is_refused_and_the_server_goes_on():
    security = Security(max_message_bytes=2048)

    async def test():
        async with target_site(security=security) as site, site.client() as client:
            with pytest.raises(TandemError) as refused:
                await answer(client.generate, GenerationRequest(text="x" * 4096))
            after = await answer(client.generate, ids(PROMPT, 4))
        return refused.value.code, len(after.token_ids)

    assert run(test()) == ("RESOURCE_EXHAUSTED", 4)


def test_so_many_stop_strings_and_no_more():
    async def test():
        async with target_site() as site, site.client() as client:
            with pytest.raises(TandemError) as refused:
                await answer(client.generate, ids(PROMPT, 1, stop_strings=tuple(f"s{n}" for n in range(65))))
        return refused.value.message

    assert run(test()) == "stop_strings: 65 are above the limit of 64"


def test_a_draft_client_waits_for_its_turn_where_it_has_as_many_sessions_as_it_may(tmp_path):
    """The refusal says when to ask again, and our client does."""
    lines = f"alice {TOKENS['alice']}\n"
    tokens = AcceptedTokens(token_file(tmp_path / "one", lines))
    security = Security(tokens=tokens, limits=ServerLimits(max_sessions_per_identity=1))
    credentials = ByToken(tmp_path).credentials("alice")

    async def test():
        async with (
            target_site(security=security) as target,
            worker_site(target.address, credentials=credentials) as worker,
            worker.client() as client,
        ):
            said = await asyncio.gather(*(answer(client.generate, ids(PROMPT, 6)) for _ in range(3)))
        return {one.token_ids for one in said}

    assert len(run(test())) == 1


@pytest.mark.parametrize("name", ["max_sessions_per_identity", "max_requests_per_identity", "max_prompt_bytes"])
def test_a_limit_is_at_least_one(name):
    with pytest.raises(ValueError, match=f"{name}: 0 is below 1"):
        ServerLimits(**{name: 0})


def test_messages_have_a_least_limit():
    with pytest.raises(ValueError, match="max_message_bytes: 1023 is below 1024"):
        Security(max_message_bytes=1023)


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ({"messages": [{"content": "x" * 90}] * 4097}, "messages: 4097 are above the limit of 4096"),
        (
            {"messages": [{"tool_calls": [{"name": "x" * 90}] * 129}]},
            "messages\\[0\\].tool_calls: 129 are above the limit of 128",
        ),
    ],
)
def test_messages_and_calls_are_counted_before_their_texts_are_read(chat: dict[str, Any], said: str) -> None:
    """A message of 4 MB has 2 million empty messages, and reading those takes seconds."""
    with pytest.raises(InvalidField, match=said):
        ServerLimits(max_prompt_bytes=8).check_generation(generation_pb2.Generation(messages=chat), 64)
