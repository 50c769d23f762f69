"""Errors and ends that a client of the door sees: keys, limits, full queues, clients that leave, servers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tandem.runners.toy import ToyConfig
from tandem.services.http import listener, protocol
from tandem.services.security.config import Security
from tandem.services.security.limits import ServerLimits
from tandem.services.security.tokens import AcceptedTokens
from tests.http.site import CHAT, COMPLETIONS, HELLO, KEY, Site, door
from tests.services.certificates import Authority, token_file
from tests.support import run, until

SLOW = ToyConfig(step_seconds=0.02)
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}


@contextlib.asynccontextmanager
async def begun(site: Site, **body: Any) -> AsyncIterator[Any]:
    """The lines of a stream whose first event was read."""
    headers = {"content-type": "application/json"}
    async with site.http.stream("POST", COMPLETIONS, content=json.dumps({**LONG, **body}), headers=headers) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        yield lines


async def rest_of(lines: Any) -> list[Any]:
    told = [line.removeprefix("data: ") async for line in lines if line]
    assert told[-1] == "[DONE]"
    return [json.loads(each) for each in told[:-1]]


def test_a_wrong_key_or_none_is_refused_and_a_right_one_is_its_identity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        tokens = AcceptedTokens(token_file(tmp_path / "keys", f"ann {KEY}\n"))
        limits = ServerLimits(max_requests_per_identity=1)
        async with door(SLOW, security=Security(tokens=tokens, limits=limits)) as site:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
                answer = await site.http.post(CHAT, json={"messages": HELLO}, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for path in ("/health", "/readiness", "/"):
                assert (await site.http.get(path)).status_code == 200
            for path in ("/v1/models", "/metrics", "/version"):
                assert (await site.http.get(path)).status_code == 401
            site.http.headers["authorization"] = f"Bearer {KEY}"
            assert [each.id async for each in site.client.models.list()] == ["toy"]
            async with begun(site):
                error = await site.refused(CHAT, {"messages": HELLO}, 429)
                assert "max_requests_per_identity" in error["message"]

    run(test())
    assert KEY not in caplog.text


def test_a_full_queue_is_a_429_that_says_when_to_try_again() -> None:
    async def test() -> None:
        async with door(SLOW, slots=1, queue=1) as site, begun(site), begun_later(site):
            await until(lambda: site.generate.under_way == 2)
            answer = await site.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 2})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["type"] == "rate_limit_error"

    run(test())


@contextlib.asynccontextmanager
async def begun_later(site: Site) -> AsyncIterator[None]:
    """A request that waits while the block runs."""
    task = asyncio.create_task(site.post(COMPLETIONS, {**LONG, "stream": False}))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots_before_the_next_step(stream: bool) -> None:
    async def test() -> None:
        async with door(SLOW, drafts=False) as site:
            if stream:
                async with begun(site, n=3):
                    assert site.generate.under_way == 3
            else:
                async with begun_later(site):
                    await until(lambda: site.engine.slots.free < 4)
            await until(lambda: site.generate.under_way == 0)
            assert site.engine.slots.free == 4
            steps = site.engine.runner.steps  # type: ignore[attr-defined]
            await asyncio.sleep(0.1)
            assert site.engine.runner.steps <= steps + 1  # type: ignore[attr-defined]

    run(test())


def test_a_stopping_server_takes_nothing_new_and_lets_streams_finish() -> None:
    async def test() -> None:
        async with door(SLOW) as site, begun(site, max_tokens=20) as lines:
            site.lifecycle.accepting = False
            answer = await site.post(CHAT, {"messages": HELLO})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert (await rest_of(lines))[-1]["choices"][0]["finish_reason"] == "length"

    run(test())


def test_a_stream_that_the_server_cuts_ends_with_an_error() -> None:
    async def test() -> None:
        async with door(SLOW) as site, begun(site) as lines:
            stopping = asyncio.create_task(site.door.stop())
            last = (await rest_of(lines))[-1]
            assert last["error"]["type"] == "server_error" and "ended before" in last["error"]["message"]
            await stopping

    run(test())


def test_a_device_that_fails_in_mid_stream_ends_it_with_its_reason() -> None:
    async def test() -> None:
        async with door(ToyConfig(fails=6, step_seconds=0.01), drafts=False) as site, begun(site) as lines:
            assert (await rest_of(lines))[-1]["error"]["code"] in ("engine_lost", "row_failed")
            assert (await site.post(CHAT, {"messages": HELLO})).status_code in (500, 503)

    run(test())


def test_ids_are_told_and_chosen_and_no_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with door() as site:
            answer = await site.post(COMPLETIONS, {"prompt": "secret", "max_tokens": 2}, **{"x-request-id": "mine"})
            assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine", "cmpl-mine")
            answer = await site.post(COMPLETIONS, {"prompt": "secret", "max_tokens": 2, "request_id": "own"})
            assert (answer.headers["x-request-id"], answer.json()["id"]) == ("own", "cmpl-own")
            assert len((await site.post(COMPLETIONS, b"secret")).headers["x-request-id"]) == 32

    with caplog.at_level(logging.INFO):
        run(test())
    assert "OpenAI/Generate: OK" in caplog.text and "secret" not in caplog.text


def test_prompts_and_answers_are_logged_if_the_operator_wants_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with door(security=Security(log_prompts=True)) as site:
            await site.post(COMPLETIONS, {"prompt": "secret", "max_tokens": 2})

    with caplog.at_level(logging.INFO, "tandem.prompts"):
        run(test())
    asked, *answered = [record.getMessage() for record in caplog.records if record.name == "tandem.prompts"]
    assert "asked" in asked and "secret" in asked and all("answered" in each for each in answered) and answered


def test_an_unknown_model_is_a_404_and_too_long_a_prompt_a_400_with_both_numbers() -> None:
    async def test() -> None:
        async with door() as site:
            error = await site.refused(COMPLETIONS, {"prompt": "a", "model": "other"}, 404)
            assert error["code"] == "model_not_found" and "toy" in error["message"]
            error = await site.refused(COMPLETIONS, {"prompt": "hello", "max_tokens": 600})
            assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
            assert "max_tokens is 600" in error["message"] and "512" in error["message"]
            error = await site.refused(CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")

    run(test())


def test_of_320_at_once_those_with_a_place_are_answered_and_the_others_told_to_come_again() -> None:
    async def test() -> None:
        async with door(slots=4, queue=60) as site:
            body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
            answers = await asyncio.gather(*(site.post(COMPLETIONS, body) for _ in range(320)))
            told = [each for each in answers if each.status_code == 429]
            served = {each.json()["choices"][0]["text"] for each in answers if each.status_code == 200}
            assert len(served) == 1 and {each.status_code for each in answers} <= {200, 429}
            assert all(each.headers["retry-after"] == "1" for each in told)
            assert site.generate.under_way == 0

    run(test())


def test_small_writes_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and body of an answer are two: with Nagle's algorithm the second waits 40 ms."""
    seen = []

    class Watched(protocol.BoundedProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(listener, "BoundedProtocol", Watched)

    async def test() -> None:
        async with door() as site:
            assert (await site.http.get("/health")).status_code == 200

    run(test())
    assert seen and all(seen)


async def raw(site: Site, *parts: bytes) -> bytes:
    """What is answered to bytes, until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.door.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_bodies_and_headers_that_are_too_large_or_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"

    async def test() -> None:
        security = Security(limits=ServerLimits(message_seconds=0.2), max_message_bytes=2048)
        async with door(security=security) as site:
            large = {"prompt": "a" * 3000}
            assert (await site.refused(COMPLETIONS, large, 413))["code"] == "body_too_large"
            chunked = head + b"transfer-encoding: chunked\r\n\r\n" + b"800\r\n" + b"a" * 2048 + b"\r\n1\r\na\r\n"
            assert b" 413 " in await raw(site, chunked)
            assert b" 408 " in await raw(site, head + b"content-length: 99\r\n\r\n{")
            assert await raw(site, b"") == b"" and await raw(site, head) == b""
            assert b" 431 " in await raw(site, head + b"x: " + b"a" * 40_000)
            other = await site.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
            assert other.status_code == 415
            assert (await site.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})).status_code == 200

    run(test())


def test_beyond_the_limit_on_connections_new_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CONNECTIONS", 2)

    async def test() -> None:
        async with door() as site:
            open_ones = [await asyncio.open_connection("127.0.0.1", site.door.port) for _ in range(2)]
            assert b" 503 " in await raw(site)
            for _, writer in open_ones:
                writer.close()

    run(test())


def test_the_servers_certificate_serves_the_door_too_and_a_clients_names_it(tmp_path: Path) -> None:
    async def test() -> None:
        authority = Authority(tmp_path)
        ours = authority.client("ann")
        limits = ServerLimits(max_requests_per_identity=1)
        async with door(SLOW, security=Security(tls=authority.server(mutual=True), limits=limits)) as site:
            trusted = ssl.create_default_context(cafile=ours.ca)
            with pytest.raises(httpx2.TransportError):
                async with httpx2.AsyncClient(verify=trusted) as http:
                    await http.get(f"{site.url}/v1/models")
            trusted.load_cert_chain(str(ours.cert), str(ours.key))
            async with httpx2.AsyncClient(verify=trusted, base_url=site.url) as site.http:
                assert (await site.http.get("/v1/models")).json()["data"][0]["id"] == "toy"
                async with begun(site):
                    assert (
                        "max_requests_per_identity" in (await site.refused(CHAT, {"messages": HELLO}, 429))["message"]
                    )

    run(test())
