"""Who finds whose prefixes: callers of one identity, and whom a caller says it calls for, within its own identity."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.rpc.channel import TARGET
from tandem.rpc.request_context import PREFIX_SCOPE, outgoing, prefix_scope, set_prefix_scope
from tandem.runners.capabilities import PAGE
from tandem.speculation.types import GenerationRequest
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_identity import ByCertificate, ByToken
from tests.support import GREEDY, Site, answer, opening, oracle, raw_stub, run, target_site, verifying

PROMPT = list(b"a prompt of more than two pages, sent by alice")
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE


@pytest.fixture(params=[ByToken, ByCertificate])
def callers(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    return request.param(tmp_path)


@contextlib.asynccontextmanager
async def sharing_site(sharing: str = "identity", **settings: Any) -> AsyncIterator[Site]:
    async with target_site(**settings) as site:
        assert site.engine
        await share_prefixes([site.engine], PrefixSharing(sharing, 1), prefix_scope)
        yield site


async def reused(stub: Any, session: str, tokens: Sequence[int] = PROMPT, scope: str = "") -> int:
    """How much a session found, which is then used and closed."""
    metadata = ((PREFIX_SCOPE, scope),) if scope else None
    opened = await stub.OpenSession(opening(session, tokens), metadata=metadata)
    said = await stub.Verify(verifying(tokens, name=session))
    assert tuple(said.token_ids) == oracle(tokens, GREEDY, 1)
    await stub.CloseSession(pb.CloseSessionRequest(session_id=session))
    return int(opened.reused_length)


@pytest.mark.parametrize(("sharing", "bobs"), [("identity", 0), ("all", WHOLE), ("off", 0)])
def test_a_callers_prefixes_are_found_by_its_own_calls_alone_unless_all_share(
    callers: Any, sharing: str, bobs: int
) -> None:
    async def test() -> list[int]:
        async with (
            sharing_site(sharing, security=callers.security) as site,
            raw_stub(site.address, TARGET, callers.credentials("alice")) as alice,
            raw_stub(site.address, TARGET, callers.credentials("bob")) as bob,
        ):
            return [await reused(alice, "1"), await reused(bob, "2"), await reused(alice, "3"), await reused(bob, "4")]

    again = 0 if sharing == "off" else WHOLE
    assert run(test()) == [0, bobs, again, again]


async def test_a_forwarded_scope_divides_a_callers_prefixes_and_opens_nobody_elses(callers: Any) -> None:
    async with (
        sharing_site(security=callers.security) as site,
        raw_stub(site.address, TARGET, callers.credentials("alice")) as alice,
        raw_stub(site.address, TARGET, callers.credentials("bob")) as bob,
    ):
        assert await reused(alice, "1", scope="carol") == 0
        assert await reused(alice, "2", scope="dave") == 0
        assert await reused(alice, "3") == 0
        assert await reused(bob, "4", scope="carol") == 0
        for guess in ("alice", "alice.example", hashed("alice"), hashed("alice", "carol"), "x" * 2000):
            assert await reused(bob, guess[:20], scope=guess) == 0
        assert await reused(alice, "5", scope="carol") == WHOLE


def hashed(identity: str, forwarded: str = "") -> str:
    set_prefix_scope(identity, forwarded)
    try:
        return prefix_scope()
    finally:
        set_prefix_scope("", "")


def test_the_scope_that_is_sent_on_is_a_hash_and_nobodys_is_not_sent() -> None:
    scopes = [hashed("alice"), hashed("alice", "b"), hashed("", "b"), hashed("alicex", ""), hashed("alice", "x")]
    assert len(set(scopes)) == len(scopes)
    assert all(len(scope) == 32 and "alice" not in scope for scope in scopes)
    assert hashed("") == "" and outgoing() is None
    set_prefix_scope("alice", "")
    sent = outgoing()
    set_prefix_scope("", "")
    assert sent == ((PREFIX_SCOPE, scopes[0]),)


async def test_completions_say_what_was_cached_and_the_openai_port_says_it_too() -> None:
    async with sharing_site() as site, site.client() as client:
        request = GenerationRequest(token_ids=tuple(PROMPT), max_new_tokens=4)
        ends = [(await answer(client.generate, request)).completion.stats for _ in range(2)]
        assert [stats.cached_prompt_tokens for stats in ends] == [0, WHOLE]
