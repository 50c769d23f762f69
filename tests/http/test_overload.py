"""Overload and ends as OpenAI's own client sees them: the rows of the table in docs/openai.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.engine.step_watch import StepBound, StepWatch
from tandem.services.security.access import Security
from tandem.services.security.call_limits import fairness_key
from tandem.services.security.callers import AcceptedTokens
from tandem.services.security.limits import ServerLimits
from tests.http.overload import DRAIN, FULL, HUNG, LOST, Row
from tests.http.site import COMPLETIONS, KEY, LENGTH, Site, at_door, door
from tests.services.certificates import token_file
from tests.support import HANG, ids, oracle, until
from tests.toy import ToyConfig, ToyRunner

SLOW = ToyConfig(step_seconds=0.02)
PROMPT: dict[str, Any] = {"model": "toy", "prompt": "hello", "temperature": 0}
LONG: dict[str, Any] = {**PROMPT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
SHORT: dict[str, Any] = {**PROMPT, "max_tokens": 4}
SAID = bytes(oracle(b"hello", ids(b"").sampling, 4)).decode("latin-1")


@contextlib.asynccontextmanager
async def begun(site: Site, client: openai.AsyncOpenAI | None = None, **body: Any) -> AsyncIterator[Any]:
    """A stream whose first event was read."""
    async with await (client or site.client).completions.create(**{**LONG, **body}, stream=True) as stream:
        await anext(stream)
        yield stream


@contextlib.asynccontextmanager
async def asked(site: Site, **body: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """A request without a stream that runs while the block does."""
    task = asyncio.create_task(site.client.completions.create(**{**LONG, **body}))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def refused(row: Row, site: Site, **body: Any) -> None:
    """Checks that new requests are refused as the row says, before a stream has begun too."""
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as error:
            await site.client.completions.create(**{**SHORT, **body}, stream=stream)
        row.refused(error.value)


async def all_free(site: Site, slots: int = 4) -> None:
    await until(lambda: site.generate.under_way == 0)
    assert site.engine.slots.free == slots


def steps(site: Site) -> int:
    return int(site.engine.runner.steps)  # type: ignore[attr-defined]


@at_door(SLOW, slots=1, queue=1)
async def test_a_full_queue_refuses_and_what_runs_goes_on(site: Site) -> None:
    async with begun(site, max_tokens=60) as stream, asked(site):
        await until(lambda: site.generate.under_way == 2)
        await refused(FULL, site)
        assert [each async for each in stream][-1].choices[0].finish_reason == "length"


async def test_a_key_that_fills_slots_and_queue_does_not_shut_out_another(tmp_path: Path) -> None:
    """Ten of one key have places; another's single request is the next to begin as soon as one of these ends."""
    other = "a-key-of-a-test-2"
    tokens = AcceptedTokens(token_file(tmp_path / "keys", f"ann {KEY}\nbob {other}\n"))
    async with door(SLOW, slots=2, queue=8, drafts=False, security=Security(tokens=tokens)) as site:
        site.engine.slots.caller = fairness_key  # as services/server_roles.py sets it
        held = [site.engine.slots.take() for _ in range(2)]
        many = [asyncio.create_task(site.client.completions.create(**{**LONG, "max_tokens": 8})) for _ in range(64)]
        await until(lambda: sum(each.done() for each in many) == 54)
        bob = site.client.with_options(api_key=other)
        single = asyncio.create_task(bob.completions.create(**SHORT))
        await until(lambda: site.engine.slots.waiting == 11)
        for slot in held:
            site.engine.slots.release(slot)
        before = steps(site)
        assert (await single).choices[0].text == SAID
        assert sum(each.done() for each in many) <= 54 + 2, "others of the first key came before it"
        assert steps(site) - before <= 2 * (8 + 2)
        for each in await asyncio.gather(*many, return_exceptions=True):
            if isinstance(each, openai.APIStatusError):
                FULL.refused(each)
        await all_free(site, 2)


@at_door(SLOW)
async def test_a_stopping_server_takes_nothing_new_and_lets_streams_finish(site: Site) -> None:
    async with begun(site, max_tokens=60) as stream:
        site.lifecycle.accepting = False
        await refused(DRAIN, site)
        assert [each async for each in stream][-1].choices[0].finish_reason == "length"


async def ended(row: Row, stream: Any, plain: asyncio.Task[Any]) -> None:
    """Checks the ends of a stream and of a request without one."""
    with pytest.raises(openai.APIStatusError) as status:
        await plain
    row.refused(status.value)
    with pytest.raises(openai.APIError) as event:
        [each async for each in stream]
    row.broke(event.value)


@at_door(SLOW)
async def test_what_the_server_cuts_ends_with_an_error_and_frees_its_slots(site: Site) -> None:
    async with asked(site) as plain, begun(site) as stream:
        stopping = asyncio.create_task(site.door.stop())
        await ended(DRAIN, stream, plain)
        await all_free(site)
        await stopping


@at_door(ToyConfig(fails=20, step_seconds=0.02), drafts=False)
async def test_a_device_that_is_lost_ends_what_runs_with_its_reason(site: Site) -> None:
    async with asked(site) as plain, begun(site) as stream:
        await ended(LOST, stream, plain)
        await refused(LOST, site)


class Gated(ToyRunner):
    """Its steps wait while the gate is closed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate, self.inside = threading.Event(), threading.Event()
        self.gate.set()

    def work(self) -> None:
        super().work()
        if not self.gate.is_set():
            self.inside.set()
            assert self.gate.wait(HANG)


@at_door(SLOW, drafts=False, kind=Gated)
async def test_a_step_that_hangs_ends_what_runs_and_frees_its_slots(site: Site) -> None:
    async with asked(site) as plain, begun(site) as stream:
        runner, now = site.engine.runner, [0.0]
        assert isinstance(runner, Gated)
        bound = StepBound(4.0)
        watch = StepWatch(site.engine.batcher, bound, site.engine.lose, lambda: now[0])
        returned = asyncio.Event()
        watch.changed = lambda fine: returned.set() if fine else None
        await until(lambda: site.engine.slots.free == 2)
        runner.gate.clear()
        await until(runner.inside.is_set)
        try:
            for _ in range(6):
                watch.look()
                now[0] += bound.looks_every
            await ended(HUNG, stream, plain)
            await all_free(site)
            await refused(HUNG, site)
        finally:
            runner.gate.set()
        await returned.wait()
        assert (await site.client.completions.create(**SHORT)).choices[0].text == SAID


async def nothing_more_runs(site: Site) -> None:
    await all_free(site)
    before = steps(site)
    await asyncio.sleep(0.1)
    assert steps(site) <= before + 1


@pytest.mark.parametrize("stream", [True, False])
@at_door(SLOW, drafts=False)
async def test_a_client_that_leaves_frees_its_slots_before_the_next_step(site: Site, stream: bool) -> None:
    if stream:
        async with begun(site, n=3):
            assert site.generate.under_way == 3
    else:
        async with asked(site):
            await until(lambda: site.engine.slots.free < 4)
    await nothing_more_runs(site)


IMPATIENT = Security(limits=ServerLimits(unread_seconds=0.3))
"""Few bytes fit between the ends of a connection of `deaf`."""


@contextlib.contextmanager
def deaf(site: Site, body: dict[str, Any]) -> Any:
    """A connection that asks and reads nothing."""
    site.door._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", site.door.port))
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(data)}"
        client.sendall(f"{head}\r\n\r\n".encode() + data)
        client.settimeout(HANG)
        yield client


def rest_of(client: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65536):
            found += data
    return found


async def test_a_client_that_stops_reading_is_ended_and_its_slots_are_freed() -> None:
    many = {"prompt": "hello", "max_tokens": LENGTH - 8, "ignore_eos": True, "n": 4, "logprobs": 20, "stream": True}
    async with door(ToyConfig(step_seconds=0.002), drafts=False, security=IMPATIENT) as site:
        with deaf(site, many) as client:
            await until(lambda: site.generate.under_way == 4)
            await all_free(site)
            said = await asyncio.to_thread(rest_of, client)
        assert b"[DONE]" not in said
        assert steps(site) < 4 * LENGTH
