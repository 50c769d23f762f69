"""What hosts may do to the HTTP port without a key: hold no memory, keep nobody out, use no name of another site."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.services.http import connections
from tandem.services.http.connections import HEADER_BYTES, host_of
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tests.http.site import COMPLETIONS, KEY, Site, at_door, door
from tests.services.certificates import token_file
from tests.support import HANG

ENDLESS = 64 * 1024 * 1024
MOST_HELD = 8 * 1024 * 1024  # of the whole process, while a connection sends eight times as much
POST = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = f"{POST}transfer-encoding: chunked\r\n\r\n"
BODY = json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0})


def keyed(tmp_path: Any) -> Security:
    return Security(tokens=AcceptedTokens(token_file(tmp_path / "tokens", f"tester {KEY}\n")))


@contextlib.asynccontextmanager
async def connected(site: Site, source: str = "127.0.0.1") -> AsyncIterator[tuple[Any, asyncio.StreamWriter]]:
    port = int(site.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def flooded(writer: asyncio.StreamWriter, piece: bytes, most: int = ENDLESS) -> int:
    """Sends a piece again and again until the server ends the connection, or `most` bytes went; returns how many."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            writer.write(piece * (65536 // len(piece)))
            await asyncio.wait_for(writer.drain(), HANG)
            sent += 65536
    return sent


STATES = {
    "before headers": (b"", b"\r\n"),
    "in a header": (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ", b"x"),
    "in headers": (b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"x-y: z\r\n"),
    "in a chunk's extension": (CHUNKED.encode() + b"1;", b"x"),
    "in trailers": (CHUNKED.encode() + b"0\r\n", b"x-y: z\r\n"),
    "in a body of a wrong key": (CHUNKED.encode(), b"1000\r\n" + b"x" * 0x1000 + b"\r\n"),
    "in trailers of a wrong key": (CHUNKED.encode() + b"1\r\nx\r\n0\r\n", b"x-y: z\r\n"),
    "after an answer": (b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n", b"x"),
    "in requests one behind the other": (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"),
}


@pytest.mark.parametrize("state", STATES)
async def test_a_connection_holds_few_bytes_in_every_state(state: str, tmp_path: Any) -> None:
    begin, piece = STATES[state]
    async with door(security=keyed(tmp_path)) as site, connected(site) as (reader, writer):
        writer.write(begin)
        read = asyncio.ensure_future(reader.read())  # so that no answer waits for its reader
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await flooded(writer, piece, 1 << 20 if b"/health" in piece else ENDLESS)
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_HELD
        read.cancel()
        answer = await site.post(COMPLETIONS, BODY.encode(), authorization=f"Bearer {KEY}")
        assert answer.status_code == 200


@at_door()
async def test_whoever_takes_all_connections_makes_way_for_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 40)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(60):
            refused, hostile = await stack.enter_async_context(connected(site, "127.0.0.2"))
            hostile.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")  # then it is idle
            answer = await refused.readuntil(b"}")
        assert b"too_many_connections" in answer
        began = time.monotonic()
        for source in ("127.0.0.3", "127.0.0.4", "127.0.0.3"):
            async with connected(site, source) as (reader, writer):
                writer.write(f"{POST}content-length: {len(BODY)}\r\nconnection: close\r\n\r\n{BODY}".encode())
                assert (await asyncio.wait_for(reader.read(), HANG)).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - began < HANG / 2


@at_door()
async def test_slow_requests_of_a_host_have_a_share_and_an_upload_of_it_outlives_what_has_no_headers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 40)
    whole = f"{POST}content-length: {len(BODY)}\r\nconnection: close\r\n\r\n{BODY}".encode()

    async def served(site: Site, source: str) -> None:
        async with connected(site, source) as (reader, writer):
            writer.write(whole)
            assert (await asyncio.wait_for(reader.read(), HANG)).startswith(b"HTTP/1.1 200")

    async with contextlib.AsyncExitStack() as stack:
        uploading, upload = await stack.enter_async_context(connected(site, "127.0.0.2"))
        upload.write(whole[:-9])
        slow = [await stack.enter_async_context(connected(site, "127.0.0.2")) for _ in range(60)]
        for _, hostile in slow:
            hostile.write(b"GET / HTTP/1.1\r\n")  # and no more
        oldest = (asyncio.wait_for(reader.read(), connections.HEADER_SECONDS / 2) for reader, _ in slow[:41])
        ends = await asyncio.gather(*oldest, return_exceptions=True)
        assert all(each == b"" or isinstance(each, ConnectionError) for each in ends), ends
        for source in ("127.0.0.2", "127.0.0.3"):
            await served(site, source)
        upload.write(whole[-9:])
        assert (await asyncio.wait_for(uploading.read(), HANG)).startswith(b"HTTP/1.1 200")


def test_hosts_are_told_apart_by_address_and_of_ipv6_by_network() -> None:
    assert host_of(("10.0.0.1", 5)) == host_of(("::ffff:10.0.0.1", 6)) == "10.0.0.1"
    assert host_of(("2001:db8::1", 5)) == host_of(("2001:db8::ffff:2", 6)) != host_of(("2001:db8:0:1::1", 5))


REFUSED = {
    "not HTTP at all": (b"hello\r\n\r\n", 400, "malformed_request"),
    "a header without a name": (b"GET / HTTP/1.1\r\nhost: localhost\r\n: x\r\n\r\n", 400, "malformed_request"),
    "headers in one piece above the limit": (
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * HEADER_BYTES + b"\r\n\r\n",
        431,
        "headers_too_large",
    ),
    "two transfer codings": (
        POST.encode() + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        501,
        "unknown_transfer_coding",
    ),
    "another expectation": (POST.encode() + b"content-length: 2\r\nexpect: boom\r\n\r\n{}", 417, "expectation_failed"),
    "another site's name": (b"GET / HTTP/1.1\r\nhost: attacker.example:8080\r\n\r\n", 403, "host_not_allowed"),
}


@pytest.mark.parametrize("what", REFUSED)
@at_door()
async def test_what_is_refused_before_it_is_a_call_has_the_form_of_the_api(site: Site, what: str) -> None:
    sent, status, code = REFUSED[what]
    async with connected(site) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        head, _, body = (await asyncio.wait_for(reader.read(), HANG)).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        error = json.loads(body)["error"]
        assert error["code"] == code and set(error) == {"message", "type", "param", "code"}


async def test_a_body_above_the_limit_gets_its_status_though_all_of_it_is_sent(tmp_path: Any) -> None:
    async with door(security=Security(max_message_bytes=1 << 20)) as site:
        error = await site.refused(COMPLETIONS, b"x" * (5 << 20), 413)
        assert error["code"] == "body_too_large"
    async with door(security=keyed(tmp_path)) as site:
        assert (await site.refused(COMPLETIONS, b"x" * (3 << 20), 401))["code"] == "invalid_api_key"


async def test_names_that_are_allowed_are_answered_and_with_keys_any(tmp_path: Any) -> None:
    async def status(site: Site, host: str, **headers: str) -> int:
        return (await site.post(COMPLETIONS, BODY.encode(), host=host, **headers)).status_code

    async with door() as site:
        for host in ("localhost", "127.0.0.1:80", "[::1]:80", "192.168.1.7", "a.localhost"):
            assert await status(site, host) == 200, host
        assert await status(site, "attacker.example") == 403
    async with door(security=keyed(tmp_path)) as site:
        assert await status(site, "tandem.example", authorization=f"Bearer {KEY}") == 200
