"""A server that is told to stop ends, whatever hangs: its device, its model's loading, readers, collectors, its log."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.rpc.channel import FUSED, TARGET
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError
from tandem.services.health import NOT_SERVING
from tandem.services.shutdown import ShutdownDeadline, bounded, bounded_call
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.reliability.frames import unread
from tests.services.test_process import health
from tests.support import (
    GREEDY,
    REPOSITORY,
    ServerProcess,
    answer,
    ids,
    opening,
    oracle,
    raw_stub,
    run,
    server_process,
    until,
    verifying,
)

HANGING = ("-m", "tests.services.hanging")
DRAIN = ("--drain_seconds", "0.2")
ENDS = 60.0  # what a busy machine may make of a fraction of a second; what hangs would hang for ever


@contextlib.contextmanager
def hanging(folder: Path, role: str, *arguments: str) -> Iterator[tuple[ServerProcess, Path]]:
    """A server whose steps hang while the file has the word "step" in it."""
    gate = folder / "gate"
    with server_process(folder, "--role", role, *DRAIN, *arguments, program=(*HANGING, str(gate))) as server:
        yield server, gate


# --- a step that hangs ---


@pytest.mark.parametrize(("role", "service"), daily([("target", TARGET), ("fused_target", FUSED)], 0))
def test_a_step_that_hangs_sends_callers_away_and_ends_the_process(tmp_path: Path, role: str, service: str) -> None:
    """No deadline is needed: the caller hears it from the server, with the tokens so far."""

    async def test(address: str, gate: Path) -> None:
        async with GenerationClient.connect(address, service) as client:
            stream = client.generate(ids(b"abc", 40, ignore_end_of_sequence=True))
            got = list((await anext(stream)).token_ids)
            gate.write_text("step")
            with pytest.raises(TandemError) as caught:
                async for event in stream:
                    got += event.token_ids
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "STEP_HUNG")
            assert tuple(got) == caught.value.produced == oracle(b"abc", GREEDY, len(got), past_the_end=True)
            assert await health(address) == NOT_SERVING
            with pytest.raises(TandemError) as caught:
                await answer(client.generate, ids(b"new"))
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "STEP_HUNG")

    pair = ("--model", "step=0.01", "--draft_model", "miss=0.3", "--draft", "model")
    with hanging(tmp_path, role, *(pair if service == FUSED else pair[:2]), "--step_seconds", "1") as (server, gate):
        run(test(server.wait_ready(), gate))
        assert server.process.wait(ENDS) == 1
        log = server.log.read_text()
        kind = "FusedRow" if role == "fused_target" else "VerifyRow"
        assert f"a step hangs: one of 1 {kind}s has run for" in log
        assert "its limit is 1.0 s" in log
        assert "did not return within" in log
        assert "forced exit: the device thread is stuck in a step" in log and "wait_while" in log


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", ["auto", "0"])
def test_sigterm_ends_a_process_whose_step_hangs_though_nobody_has_seen_it(tmp_path: Path, seconds: str) -> None:
    async def ask(address: str, gate: Path, pid: int) -> None:
        async with raw_stub(address) as target:
            gate.write_text("step")
            call = target.OpenSession(opening())
            await until((gate.parent / "gate.hangs").exists)
            os.kill(pid, signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError):
                await call

    with hanging(tmp_path, "target", "--step_seconds", seconds) as (server, gate):
        run(ask(server.wait_ready(), gate, server.process.pid))
        assert server.process.wait(ENDS) == 1
        log = server.log.read_text()
        assert "forced exit: it" in log and "device-target_0 in wait_while (hanging.py:" in log


@pytest.mark.thorough
def test_sigterm_ends_a_process_whose_model_never_loads(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("load")
    arguments = ("--backend", "toy", "--port", "0", "--role", "target", "--debug")
    server = ServerProcess(tmp_path, *arguments, program=(*HANGING, str(gate)))
    try:
        run(until((tmp_path / "gate.hangs").exists, 30))
        assert server.stop(ENDS) == 1
        assert "forced exit: the model is still loading" in server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()


# --- readers, collectors, logs ---


def test_sigterm_ends_a_process_whose_replies_nobody_reads(tmp_path: Path) -> None:
    """Generate and VerifyStream of a window of 0."""

    async def test(address: str) -> list[socket.socket]:
        async with raw_stub(address) as target:
            await target.OpenSession(opening())
        generation = generation_pb2.Generation(
            token_ids=generation_pb2.TokenIds(ids=[1, 2]), max_new_tokens=20, ignore_end_of_sequence=True
        )
        generate = pb.TargetVerifierGenerateRequest(generation=generation).SerializeToString()
        verify = verifying().SerializeToString()
        readers = []
        for name, request, ends in (("Generate", generate, True), ("VerifyStream", verify, False)):
            path = f"/tandem.v1.TargetVerifier/{name}"
            readers.append(await asyncio.to_thread(unread, address, path, request, ends))
        return readers

    with server_process(tmp_path, "--role", "target", *DRAIN) as server:
        readers = run(test(server.wait_ready()))
        assert server.stop(ENDS) == 0
        assert "stopped" in server.log.read_text()
        for reader in readers:
            reader.close()


def unread_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.thorough  # daily in parts, below
def test_sigterm_ends_a_process_whose_log_nobody_reads(tmp_path: Path) -> None:
    """The event loop is held up in a write, and never hears of the signal."""
    ready = tmp_path / "ready.json"
    arguments = ("--role", "target", "--backend", "toy", "--port", "0", "--ready_file", str(ready), *DRAIN)
    reads, writes = os.pipe()
    program = [sys.executable, *HANGING, str(tmp_path / "gate"), *arguments]
    with subprocess.Popen(program, stdout=writes, stderr=writes, cwd=REPOSITORY) as server:

        async def fill(address: str) -> None:
            """Refused openings are logged, until none of them is answered and nothing more comes through the pipe."""
            async with raw_stub(address) as target:
                written = -1
                while True:
                    calls = [target.OpenSession(opening("x" * 129), timeout=2) for _ in range(200)]
                    results = await asyncio.gather(*calls, return_exceptions=True)
                    answered = [e for e in results if e.code() is grpc.StatusCode.INVALID_ARGUMENT]
                    before, written = written, unread_bytes(reads)
                    if not answered and written == before:
                        break

        try:
            run(until(ready.exists, 30))
            said = json.loads(ready.read_text())
            run(fill(f"{said['host']}:{said['port']}"))
            server.send_signal(signal.SIGTERM)
            assert server.wait(ENDS) == 1
        finally:
            server.kill()
            os.close(reads)
            os.close(writes)


# --- the parts ---


class Left:
    """In place of os._exit."""

    def __init__(self) -> None:
        self.code: list[int] = []
        self.called = threading.Event()

    def __call__(self, code: int) -> None:
        self.code.append(code)
        self.called.set()


def test_a_process_is_ended_at_the_earliest_of_several_times_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    left = Left()
    ending = ShutdownDeadline(left)
    ending.begin()
    ending.within(1e6, "the drain was long")
    ending.within(0.0, "the device hangs")
    ending.within(2e6, "it was asked again")
    with caplog.at_level(logging.CRITICAL):
        assert left.called.wait(20)
    assert left.code == [1]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("forced exit: the device hangs; threads: MainThread in ")


def test_a_log_that_hangs_does_not_keep_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    left, written = Left(), threading.Event()
    monkeypatch.setattr("tandem.services.shutdown._log_reason", lambda why: written.wait(60))
    monkeypatch.setattr("tandem.services.shutdown._LOG_SECONDS", 0.01)
    ending = ShutdownDeadline(left)
    ending.begin()
    ending.within(0.0, "whatever")
    assert left.called.wait(20)
    written.set()


async def test_a_part_of_the_end_that_hangs_or_fails_is_logged_and_left(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise RuntimeError("not today")

    def breaks() -> None:
        raise RuntimeError("nor today")

    held = threading.Event()
    await bounded(asyncio.Event().wait(), "a port", 0.01)
    await bounded(fails(), "a socket")
    await bounded_call(held.wait, "a collector", 0.01)
    await bounded_call(breaks, "another")
    held.set()
    said: list[Any] = [record.getMessage() for record in caplog.records]
    assert said == [
        "stopping: a port took more than 0.01 s and is abandoned",
        "stopping: a socket failed",
        "stopping: a collector took more than 0.01 s and is abandoned",
        "stopping: another failed",
    ]
