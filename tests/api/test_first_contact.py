"""A server that does not answer is told at once, with its own reason; one that starts is waited for if asked."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.cli import main
from tandem.clients.terminal import ClientConfig, run_client
from tandem.launch import free_port
from tandem.rpc.channel import FUSED, TARGET
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tandem.speculation.types import GenerationRequest
from tests.http.site import door
from tests.services.certificates import Authority, token_file
from tests.support import GREEDY, HANG, oracle, run, target_site

PROMPT = b"who is there"
SAID = oracle(PROMPT, GREEDY, 8)
AT_ONCE = 5.0
"""Seconds, on a very busy machine; some 0.05 on an idle one. Where a connection was waited for, it took 10."""

Found = AsyncIterator[tuple[str, tandem.Credentials | None]]


@contextlib.asynccontextmanager
async def _listening(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> Any:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def _says(words: bytes) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if words:
            await reader.read(10)
            writer.write(words)
        writer.close()

    async with _listening(answer) as address:
        yield address


def _plain(served: Callable[[], Any]) -> Callable[[Path], Any]:
    """A server that gives its address or URL, asked in clear text."""

    @contextlib.asynccontextmanager
    async def found(folder: Path) -> Found:
        async with served() as at:
            yield getattr(at, "url", at).removeprefix("http://"), None

    return found


def _target(made: Callable[[Path], tuple[Security | None, tandem.Credentials | None]]) -> Callable[[Path], Any]:
    """A target with its security, asked with these credentials."""

    @contextlib.asynccontextmanager
    async def found(folder: Path) -> Found:
        security, credentials = made(folder)
        async with target_site(security=security) as site:
            yield site.address, credentials

    return found


def _no_certificate(folder: Path) -> tuple[Security, tandem.Credentials]:
    authority = Authority(folder)
    return Security(tls=authority.server(mutual=True)), authority.client()


def _tokens(folder: Path) -> Security:
    return Security(tokens=AcceptedTokens(token_file(folder / "accepted", "alice one-long-enough-token\n")))


def _unknown_token(folder: Path) -> tuple[Security, tandem.Credentials]:
    shown = token_file(folder / "shown", "another-long-enough-token\n")
    return _tokens(folder), tandem.Credentials(token_file=shown)


another_authority = _target(
    lambda folder: (Security(tls=Authority(folder / "its").server()), Authority(folder / "ours").client())
)
CASES: dict[str, tuple[Any, str, str]] = {
    "refused": (
        _plain(lambda: contextlib.nullcontext(f"127.0.0.1:{free_port()}")),
        "CONNECTION_REFUSED",
        "start the server, or check host and port; --connect_seconds 60 (in Python: wait_",
    ),
    "no such name": (
        _plain(lambda: contextlib.nullcontext("no-such-machine.invalid:50051")),
        "UNKNOWN_HOST",
        "no machine has the name 'no-such-machine.invalid'",
    ),
    "TLS at clear text": (
        _target(lambda folder: (None, Authority(folder).client())),
        "NO_TLS",
        "speaks clear text, and this client TLS: leave out --tls_ca",
    ),
    "clear text at TLS": (
        _target(lambda folder: (Security(tls=Authority(folder).server()), None)),
        "NO_GRPC",
        "TLS or clear text differ (this client speaks clear text)",
    ),
    "another authority": (another_authority, "UNTRUSTED", "is not accepted: see --tls_ca"),
    "no certificate": (_target(_no_certificate), "NO_GRPC", "it wants a certificate"),
    "an HTTP port": (_plain(door), "OTHER_PROTOCOL", "give the port of gRPC"),
    "SSH": (_plain(lambda: _says(b"SSH-2.0-OpenSSH_9.9\r\n")), "OTHER_PROTOCOL", "give the port of gRPC"),
    "closed at once": (_plain(lambda: _says(b"")), "NO_GRPC", "answers no gRPC ("),
    "no token": (
        _target(lambda folder: (_tokens(folder), None)),
        "UNAUTHENTICATED",
        "no token: this server requires one, as metadata `authorization: Bearer TOKEN`; give",
    ),
    "unknown token": (
        _target(_unknown_token),
        "UNAUTHENTICATED",
        "unknown token: it is wrong, or was revoked; check the token sent",
    ),
}


async def _asynchronous(address: str, credentials: tandem.Credentials | None) -> None:
    async with tandem.AsyncClient(address, credentials=credentials) as client:
        await client.generate(PROMPT, max_new_tokens=8)


async def _blocking(address: str, credentials: tandem.Credentials | None) -> None:
    def ask() -> None:
        with tandem.Client(address, credentials=credentials, service=TARGET) as client:
            list(client.stream(PROMPT, max_new_tokens=8))

    await asyncio.to_thread(ask)


async def _own_drafts(address: str, credentials: tandem.Credentials | None) -> None:
    class Nothing:
        def propose(self, tokens: Any, k: int) -> list[int]:
            return []

    await asyncio.to_thread(lambda: tandem.DraftSession(address, Nothing(), credentials=credentials).close())


async def _terminal(address: str, credentials: tandem.Credentials | None) -> None:
    config = ClientConfig(address, ("x",), GenerationRequest(text=""), credentials=credentials or tandem.Credentials())
    await run_client(config, None)


@pytest.mark.each_value
@pytest.mark.parametrize("ask", [_asynchronous, _blocking, _own_drafts, _terminal], ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("case", CASES)
async def test_why_no_server_answers_is_said_at_once_with_what_to_do(case: str, ask: Any, tmp_path: Path) -> None:
    server, reason, said = CASES[case]
    async with server(tmp_path) as (address, credentials):
        began = time.monotonic()
        with pytest.raises(tandem.TandemError) as told:
            await ask(address, credentials)
        error, seconds, address = told.value, time.monotonic() - began, address
    assert error.reason == reason and said in error.message, error
    assert "\n" not in error.message and error.message.count(address) <= 1, error
    assert seconds < AT_ONCE


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "http://localhost:50051",
            "'http://localhost:50051' has the scheme http://; give HOST:PORT alone, as 'localhost",
        ),
        ("grpc://localhost:50051/x", "has the scheme grpc://; give HOST:PORT alone, as 'localhost:50051'"),
        ("localhost", "'localhost' is not HOST:PORT"),
        ("localhost:http", "is not HOST:PORT"),
    ],
)
def test_an_address_of_another_form_is_refused_before_any_call(address: str, said: str) -> None:
    for make in (tandem.Client, tandem.AsyncClient, lambda each: tandem.DraftSession(each, _Repeat())):
        with pytest.raises(tandem.TandemError) as told:
            make(address)
        assert said in str(told.value) and told.value.code == "INVALID_ARGUMENT"
        assert told.value.field in ("endpoints", "target")


class _Repeat:
    def propose(self, tokens: Any, k: int) -> Any:
        return tokens[-1:] * k


async def test_a_service_that_the_server_does_not_have_is_named() -> None:
    async with target_site() as site, tandem.AsyncClient(site.address, service=FUSED) as client:
        with pytest.raises(tandem.TandemError, match=f"{site.address} has no {FUSED}: ask for another") as told:
            await client.generate(PROMPT)
        assert (told.value.code, told.value.reason) == ("UNIMPLEMENTED", "NO_SUCH_SERVICE")


def test_a_closed_client_says_so_and_calls_nobody() -> None:
    client = tandem.Client(f"127.0.0.1:{free_port()}")
    client.close()

    async def asynchronous() -> None:
        other = tandem.AsyncClient(f"127.0.0.1:{free_port()}")
        await other.close()
        await other.generate("x")

    for ask in (lambda: client.generate("x"), lambda: run(asynchronous())):
        with pytest.raises(tandem.TandemError, match="the client is closed") as told:
            ask()
        assert (told.value.code, told.value.reason) == ("CANCELLED", "CLOSED")


# --- waiting, where it is asked for ---


@pytest.mark.parametrize("ask", ["client", "draft session", "terminal"])
def test_a_server_that_starts_later_is_waited_for_if_asked(
    ask: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"

    async def asked() -> tuple[int, ...]:
        if ask == "terminal":
            request = GenerationRequest(text="", max_new_tokens=8)
            config = ClientConfig(address, (PROMPT.decode(),), request, connect_seconds=HANG)
            assert await run_client(config, TARGET) == 0
            return SAID
        if ask == "client":
            async with tandem.AsyncClient(address, wait_seconds=HANG) as client:
                return (await client.generate(PROMPT, max_new_tokens=8)).token_ids

        def drafting() -> tuple[int, ...]:
            with tandem.DraftSession(address, _Repeat(), wait_seconds=HANG) as session:
                return session.generate(list(PROMPT), max_new_tokens=8).token_ids

        return await asyncio.to_thread(drafting)

    async def test() -> tuple[int, ...]:
        asking = asyncio.create_task(asked())
        while "waiting up to" not in caplog.text:
            await asyncio.sleep(0.01)
        async with target_site(port=port):
            return await asking

    assert run(test()) == SAID
    assert f"nothing listens at {address} (connection refused)" in caplog.text
    assert "--connect_seconds" not in caplog.text
    assert caplog.text.count("waiting up to") == 1


def test_waiting_ends_in_time_and_says_why() -> None:
    began = time.monotonic()
    address = f"127.0.0.1:{free_port()}"
    with tandem.Client(address, wait_seconds=0.4) as client, pytest.raises(tandem.TandemError) as told:
        client.generate("x")
    assert told.value.reason == "CONNECTION_REFUSED" and 0.4 <= time.monotonic() - began < 0.4 + AT_ONCE


async def test_what_no_waiting_mends_is_not_waited_for(tmp_path: Path) -> None:
    async with another_authority(tmp_path) as (address, credentials):
        began = time.monotonic()
        async with tandem.AsyncClient(address, credentials=credentials, wait_seconds=HANG) as client:
            with pytest.raises(tandem.TandemError, match="not accepted"):
                await client.model_info()
        assert time.monotonic() - began < AT_ONCE


# --- servers that name their peers ---


@pytest.mark.parametrize(
    "role",
    [
        "--role draft_worker --port 0 --target_port PORT",
        "--role target --port 0 --draft_host 127.0.0.1:PORT",
        "--role draft --port PORT --prompt x",
        "--role client --port PORT --prompt x",
    ],
)
def test_a_role_whose_peer_speaks_no_grpc_ends_with_one_line(role: str, capfd: pytest.CaptureFixture[str]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        backend = "" if "client" in role else " --backend toy"
        code = main.main(f"{role}{backend}".replace("PORT", str(server.server_port)).split())
        server.shutdown()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("main.py: ")]
    assert code in (1, 2) and len(said) == 1
    assert f"127.0.0.1:{server.server_port} speaks no gRPC there, but perhaps HTTP" in said[0]
