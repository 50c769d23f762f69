"""Who finds whose prefixes: callers of one identity, and whom a caller says it calls for, within its own identity."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from prometheus_client import generate_latest

from tandem.engine.prefix_cache import PrefixSharing, share_prefixes
from tandem.rpc.channel import TARGET
from tandem.rpc.request_context import PREFIX_SCOPE, outgoing, prefix_scope, set_prefix_scope
from tandem.runners.pages import PAGE
from tandem.services.observability.metrics import Metrics
from tandem.speculation.types import GenerationRequest
from tandem.v1 import target_verifier_pb2 as pb
from tests.services.test_identity import TOKENS, ByCertificate, ByToken, opening, verifying
from tests.support import GREEDY, Site, oracle, raw_stub, run, target_site, worker_site

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
    opened = await stub.OpenSession(opening(session, list(tokens)), metadata=metadata)
    said = await stub.Verify(verifying(session, list(tokens)))
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


def test_a_forwarded_scope_divides_a_callers_prefixes_and_opens_nobody_elses(callers: Any) -> None:
    async def test() -> None:
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

    run(test())


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


def test_a_draft_workers_callers_share_neither_its_own_prefixes_nor_its_targets(callers: Any) -> None:
    """The target has no identities of its own: what keeps callers apart there is the scope that the worker sends."""

    async def cached(site: Site, name: str) -> int:
        request = GenerationRequest(token_ids=tuple(PROMPT), max_new_tokens=4)
        client = site.client(callers.credentials(name))
        end: Any = None
        try:
            async for event in client.generate(request):
                end = event
        finally:
            await client.close()
        return int(end.stats.cached_prompt_tokens)

    async def test() -> None:
        async with (
            sharing_site() as target,
            worker_site(target.address, draft="", security=callers.security) as worker,
        ):
            assert worker.engine and target.engine and target.engine.prefixes
            await share_prefixes([worker.engine], PrefixSharing("identity", 1), prefix_scope)
            found = [await cached(worker, name) for name in ("alice", "bob", "alice", "bob")]
            assert found == [0, 0, WHOLE, WHOLE]
            assert worker.engine.prefixes and worker.engine.prefixes.hits
            scopes = {scope for scope, *_ in target.engine.prefixes.tree.scopes}
            assert len(scopes) == 2 and not scopes & {"", *TOKENS, "alice.example", "bob.example"}
            assert len(worker.engine.prefixes.tree.scopes) == 2

    run(test())


def test_a_session_that_moves_here_finds_its_prompt_and_says_what_was_reused() -> None:
    """As after a failover: the same tokens, from a server that knows the prompt from other sessions."""

    async def test() -> None:
        async with sharing_site() as site, raw_stub(site.address) as stub:
            await reused(stub, "before")
            committed = [*PROMPT, *oracle(PROMPT, GREEDY, 20, past_the_end=True)]
            moved = await stub.OpenSession(opening("moved", committed))
            assert moved.reused_length == WHOLE and moved.committed_length == len(committed)
            again = await stub.OpenSession(opening("moved", committed))
            assert again.reused_length == len(committed) - 1, "its own slot has it now"
            said = await stub.Verify(verifying("moved", committed))
            assert tuple(said.token_ids) == oracle(committed, GREEDY, 1)
            await stub.CloseSession(pb.CloseSessionRequest(session_id="moved"))
            assert await reused(stub, "later", committed) == (len(committed) - 1) // PAGE * PAGE

    run(test())


def test_completions_say_what_was_cached_and_the_openai_port_says_it_too() -> None:
    async def test() -> None:
        async with sharing_site() as site:
            client = site.client()
            request = GenerationRequest(token_ids=tuple(PROMPT), max_new_tokens=4)
            ends = []
            for _ in range(2):
                events = [event async for event in client.generate(request)]
                ends.append(events[-1].stats.cached_prompt_tokens)  # type: ignore[union-attr]
            await client.close()
            assert ends == [0, WHOLE]

    run(test())


def test_metrics_count_tokens_under_vllms_names_and_show_the_memory() -> None:
    async def test() -> str:
        async with sharing_site() as site, raw_stub(site.address) as stub:
            assert site.engine and site.engine.prefixes
            metrics = Metrics("target", "toy", 5, {})
            metrics.states.watch_engines({"target": site.engine})
            for session in "12":
                await reused(stub, session)
            return generate_latest(metrics.registry).decode()

    shown = run(test())
    labels = '{engine="0",model_name="toy"}'
    assert f"vllm:prefix_cache_queries_total{labels} {2 * (len(PROMPT) - 1)}.0" in shown
    assert f"vllm:prefix_cache_hits_total{labels} {WHOLE}.0" in shown
    assert 'tandem:prefix_cache_bytes{of="target"} 2432.0' in shown
    assert 'tandem:prefix_cache_limit_bytes{of="target"} 1.048192e+06' in shown
