"""What one caller may have at a time, and how much it may send."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tandem.rpc.received_errors import TandemError
from tandem.services.security.access import Security
from tandem.services.security.limits import ServerLimits
from tandem.services.security.tokens import AcceptedTokens
from tandem.speculation.types import GenerationRequest
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.certificates import token_file
from tests.services.test_identity import TOKENS, ByToken
from tests.support import HANG, TARGET, answer, ids, opening, raw_stub, refusal, target_site, toy, until, worker_site
from tests.toy import ToyRunner, ToyTokenizer

PROMPT = b"many at once"


def limited(tmp_path, **limits: int) -> tuple[ByToken, Security]:
    callers = ByToken(tmp_path)
    return callers, Security(tokens=callers.security.tokens, limits=ServerLimits(**limits))


async def test_one_caller_has_so_many_sessions_and_another_its_own(tmp_path):
    callers, security = limited(tmp_path, max_sessions_per_identity=2)
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
    assert (refused.code, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", 0.1)
    assert refused.message == "max_sessions_per_identity: 2 of your sessions are open, the limit is 2"


class Gated(ToyRunner):
    """Computes nothing before it is let."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open = threading.Event()

    def logits(self, slot: int, position: int) -> Any:
        assert self.open.wait(HANG)
        return super().logits(slot, position)


async def test_one_caller_has_so_many_requests_under_way_and_another_its_own(tmp_path):
    callers, security = limited(tmp_path, max_requests_per_identity=1)
    runner = toy(kind=Gated)
    assert isinstance(runner, Gated)
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
    refused = refused.value
    assert (refused.code, refused.retry_seconds) == ("RESOURCE_EXHAUSTED", 0.1)
    assert refused.message == "max_requests_per_identity: 1 of your requests are running, the limit is 1"


async def test_a_text_above_the_operators_limit_is_refused_before_it_is_tokenized(monkeypatch):
    limits = ServerLimits(max_prompt_bytes=100)
    monkeypatch.setattr(ToyTokenizer, "encode", None)
    async with target_site(security=Security(limits=limits)) as site, site.client() as client:
        with pytest.raises(TandemError) as refused:
            await answer(client.generate, GenerationRequest(text="é" * 50 + "x"))
    code, message = refused.value.code, refused.value.message
    assert code == "OUT_OF_RANGE"
    assert message == "the prompt has 101 bytes and this server takes 100 (max_prompt_bytes)"


async def test_a_message_that_is_too_large_is_refused_and_the_server_goes_on():
    security = Security(max_message_bytes=2048)
    async with target_site(security=security) as site, site.client() as client:
        with pytest.raises(TandemError) as refused:
            await answer(client.generate, GenerationRequest(text="x" * 4096))
        after = await answer(client.generate, ids(PROMPT, 4))
    assert (refused.value.code, len(after.token_ids)) == ("RESOURCE_EXHAUSTED", 4)


async def test_a_draft_client_waits_for_its_turn_where_it_has_as_many_sessions_as_it_may(tmp_path):
    """The refusal says when to ask again, and our client does."""
    lines = f"alice {TOKENS['alice']}\n"
    tokens = AcceptedTokens(token_file(tmp_path / "one", lines))
    security = Security(tokens=tokens, limits=ServerLimits(max_sessions_per_identity=1))
    credentials = ByToken(tmp_path).credentials("alice")
    async with (
        target_site(security=security) as target,
        worker_site(target.address, credentials=credentials) as worker,
        worker.client() as client,
    ):
        said = await asyncio.gather(*(answer(client.generate, ids(PROMPT, 6)) for _ in range(3)))
    found = {one.token_ids for one in said}
    assert len(found) == 1
