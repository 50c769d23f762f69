"""Errors and ends that a client of the door sees: keys, limits, full queues, clients that leave, servers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tandem.services.http import connections
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tandem.services.security.limits import ServerLimits
from tests.http.site import CHAT, COMPLETIONS, HELLO, KEY, Site, at_door, door
from tests.services.certificates import Authority, token_file
from tests.toy import ToyConfig

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


async def test_a_wrong_key_or_none_is_refused_and_a_right_one_is_its_identity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = AcceptedTokens(token_file(tmp_path / "keys", f"ann {KEY}\n"))
    limits = ServerLimits(max_requests_per_identity=1)
    async with door(SLOW, security=Security(tokens=tokens, limits=limits)) as site:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
            answer = await site.http.post(CHAT, json={"messages": HELLO}, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/"):
            assert (await site.http.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/version"):
            assert (await site.http.get(path)).status_code == 401
        site.http.headers["authorization"] = f"Bearer {KEY}"
        assert [each.id async for each in site.client.models.list()] == ["toy"]
        async with begun(site):
            error = await site.refused(CHAT, {"messages": HELLO}, 429)
            assert "max_requests_per_identity" in error["message"]
    assert KEY not in caplog.text


async def test_ids_are_told_and_chosen_and_no_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with door() as site:
            answer = await site.post(COMPLETIONS, {"prompt": "secret", "max_tokens": 2}, **{"x-request-id": "mine"})
            assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine", "cmpl-mine")
            assert len((await site.post(COMPLETIONS, b"secret")).headers["x-request-id"]) == 32
    assert "OpenAI/Generate: OK" in caplog.text and "secret" not in caplog.text


@at_door()
async def test_an_unknown_model_is_a_404_and_too_long_a_prompt_a_400_with_both_numbers(site: Site) -> None:
    error = await site.refused(COMPLETIONS, {"prompt": "a", "model": "other"}, 404)
    assert error["code"] == "model_not_found" and "toy" in error["message"]
    error = await site.refused(COMPLETIONS, {"prompt": "hello", "max_tokens": 600})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "max_tokens is 600" in error["message"] and "512" in error["message"]
    error = await site.refused(CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


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


async def test_bodies_and_headers_that_are_too_large_or_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
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


async def test_the_servers_certificate_serves_the_door_too_and_a_clients_names_it(tmp_path: Path) -> None:
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
                assert "max_requests_per_identity" in (await site.refused(CHAT, {"messages": HELLO}, 429))["message"]
