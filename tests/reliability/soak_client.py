"""Eight clients in a process of their own that ask, leave, abandon and break off, until they are told to end or killed.

    python -m tests.reliability.soak_client --seed 1 --counts FILE target:TargetVerifier=HOST:PORT ...

Two lines of JSON per second go to the file, what was counted so far, so that a kill loses little; and one for every
operation that failed in a way that only a disturbance of its server excuses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc

from tandem.clients.distributed import connect_distributed
from tandem.engine.drafting import Drafting
from tandem.rpc import wire
from tandem.rpc.channel import TARGET, open_channel, stub
from tandem.rpc.errors import TandemError, from_rpc
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.stream_status import ENDED_MEANWHILE
from tandem.speculation.retry import Persistence
from tandem.speculation.types import Chunk, GenerationRequest, InvalidField, SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.hostile_grammars import HOSTILE, random_structure
from tests.reliability.traffic import Ask
from tests.support import HANG, draft_config, drafting

CLIENTS, PROMPTS = 8, 40
EXPECTED = ("RESOURCE_EXHAUSTED", "CANCELLED")
LEASE = 0.5
EXPIRED = ("SESSION_EXPIRED", "STREAM_IDLE")
"""Leases here are short: a client that a busy machine keeps from asking for so long loses its session."""
DRAFT = draft_config("miss=0.3", CLIENTS, 96)
"""What drafts for the clients of a process that drive a target that never waits."""
Servers = dict[str, tuple[str, str]]
"""By name: its service, its address."""


@functools.cache
def _ask(number: int) -> Ask:
    sampling = SamplingParams() if number % 2 else SamplingParams(temperature=0.9, top_k=40, seed=number)
    adapter = ("", "red", "", "blue", "")[number % 5]
    return Ask((65 + number, *range(number % 17)), sampling, 8 + number % 16, number % 6, adapter=adapter)


@functools.cache
def _expected(number: int) -> tuple[int, ...]:
    ask = _ask(number)
    return ask.expected


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """asyncio.wait_for of Python 3.11 swallows a cancellation that comes as the work ends; this does not.

    Raises asyncio.TimeoutError.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def told(server: str, operation: str, began: float, error: str, code: str = "", reason: str = "") -> dict[str, Any]:
    """A failure, as it stands in the file. Nothing excuses one without a code."""
    when = {"began": began, "ended": time.time()}
    return {"server": server, "operation": operation, "error": error, "code": code, "reason": reason, **when}


class SoakClient:
    """One client: an endless row of operations, by chance; everything that is answered is compared with the truth."""

    def __init__(
        self,
        servers: Servers,
        chance: random.Random,
        counts: Counter[str],
        failed: Callable[[dict[str, Any]], None],
        drafts: Drafting,
    ) -> None:
        self._servers, self._chance, self._counts, self._failed = servers, chance, counts, failed
        self._drafts = drafts
        self._made, self._server = 0, ""

    async def run(self, ending: asyncio.Event) -> None:
        """Until `ending`, or cancelled."""
        operations = [self._ask, self._ask, self._leave, self._late, self._session, self._abandon]
        operations += [self._cancel_open, self._break, self._run, self._never_wait, self._hostile]
        while not ending.is_set():
            operation, began = self._chance.choice(operations), time.time()
            try:
                await within(HANG, operation())
                self._counts[operation.__name__.strip("_")] += 1
            except (TandemError, grpc.RpcError) as error:
                failed = error if isinstance(error, TandemError) else from_rpc(error)
                ended_meanwhile = (failed.code, failed.message) == ENDED_MEANWHILE
                if failed.code in EXPECTED:
                    self._counts["refused"] += 1
                elif (failed.reason in EXPIRED or ended_meanwhile) and time.time() - began >= LEASE:
                    self._counts["expired"] += 1
                else:
                    code = "UNAVAILABLE" if ended_meanwhile else failed.code
                    self._note(operation.__name__, began, str(failed), code, failed.reason)
                await asyncio.sleep(failed.retry_seconds or 0.05)
            except asyncio.TimeoutError:
                self._note(operation.__name__, began, f"hung for {HANG:g} s")
            except Exception as error:  # whatever it is, no server may bring it about
                self._note(operation.__name__, began, repr(error))
                await asyncio.sleep(0.05)

    def _note(self, operation: str, began: float, error: str, code: str = "", reason: str = "") -> None:
        self._failed(told(self._server, operation, began, error, code, reason))

    def _any(self, service: str | None = None) -> tuple[str, str]:
        """A server by chance: its service, its address."""
        names = [name for name, (its, _) in self._servers.items() if service in (None, its)]
        self._server = self._chance.choice(names)
        return self._servers[self._server]

    def _compare(self, said: list[int], number: int, whole: bool) -> None:
        expected = list(_expected(number))
        self._counts["tokens"] += len(said)
        if said != (expected if whole else expected[: len(said)]):
            self._counts["wrong"] += 1

    async def _ask(self) -> None:
        await self._generate(whole=True)

    async def _leave(self) -> None:
        """A request that is left in the middle."""
        await self._generate(whole=False)

    async def _late(self) -> None:
        """A request whose deadline may pass anywhere: before it is admitted, in its prompt, between rounds."""
        (service, address), number = self._any(), self._chance.randrange(PROMPTS)
        async with GenerationClient.connect(address, service) as client:
            try:
                stream = client.generate(_ask(number).request(), timeout=self._chance.uniform(0.001, 0.1))
                async for _ in stream:
                    pass
            except TandemError as error:
                self._compare(list(error.produced), number, whole=False)
                if error.code != "DEADLINE_EXCEEDED":
                    raise

    async def _generate(self, whole: bool) -> None:
        (service, address), number = self._any(), self._chance.randrange(PROMPTS)
        said: list[int] = []
        chunks = self._chance.randrange(1, 5)
        async with GenerationClient.connect(address, service) as client:
            async with contextlib.aclosing(client.generate(_ask(number).request())) as events:
                async for event in events:
                    said += event.token_ids if isinstance(event, Chunk) else ()
                    chunks -= 1
                    if not whole and chunks == 0:
                        break
            self._compare(said, number, whole)

    @contextlib.asynccontextmanager
    async def _opened(self, number: int) -> Any:
        ask = _ask(number)
        self._made += 1
        name = f"soak-{self._chance.randrange(2**60):x}-{self._made}"
        async with open_channel(self._any(TARGET)[1]) as channel:
            target = stub(channel, TARGET)
            opening = pb.OpenSessionRequest(
                session_id=name,
                prefix=ask.prompt,
                prompt_length=1,
                sampling=wire.sampling_to_wire(ask.sampling),
                adapter=ask.adapter,
            )
            yield target, opening

    async def _rounds(self, target: Any, opening: Any, number: int, most: int) -> None:
        ask, truth = _ask(number), [*_ask(number).prompt, *_expected(number)]
        tokens = list(ask.prompt)
        while len(tokens) < len(truth) and most:
            draft = [t if self._chance.random() < 0.7 else 1 for t in truth[len(tokens) : len(tokens) + ask.k]]
            reply = await target.Verify(
                pb.VerifyRequest(
                    session_id=opening.session_id, base_length=len(tokens), last_token=tokens[-1], draft_tokens=draft
                ),
                timeout=HANG / 2,
            )
            tokens += reply.token_ids
            most -= 1
        self._compare(tokens[len(ask.prompt) : len(truth)], number, whole=False)

    async def _session(self) -> None:
        number = self._chance.randrange(PROMPTS)
        async with self._opened(number) as (target, opening):
            await target.OpenSession(opening, timeout=HANG / 2)
            try:
                await self._rounds(target, opening, number, 99)
            finally:
                await target.CloseSession(pb.CloseSessionRequest(session_id=opening.session_id), timeout=HANG / 2)

    async def _abandon(self) -> None:
        """A session whose client is gone: its lease runs out."""
        number = self._chance.randrange(PROMPTS)
        async with self._opened(number) as (target, opening):
            await target.OpenSession(opening, timeout=HANG / 2)
            await self._rounds(target, opening, number, 2)

    async def _run(self) -> None:
        """A run: read to its end, left in the middle, or left unread until its lease runs out."""
        number, how = self._chance.randrange(PROMPTS), self._chance.choice(["read", "read", "leave", "abandon"])
        ask, truth = _ask(number), [*_ask(number).prompt, *_expected(number)]
        async with self._opened(number) as (target, opening):
            await target.OpenSession(opening, timeout=HANG / 2)
            call, tokens = target.VerifyStream(timeout=HANG / 2), list(ask.prompt)
            try:
                while len(tokens) < len(truth):
                    draft = [t if self._chance.random() < 0.7 else 1 for t in truth[len(tokens) : len(tokens) + ask.k]]
                    await self._written(call, opening.session_id, tokens, draft, len(truth))
                    for _ in range(self._chance.randrange(1, 4)):
                        if len(tokens) < len(truth):
                            tokens += await self._told(call)
                    if how != "read":
                        break
            finally:
                if how != "abandon":
                    call.cancel()
                    await target.CloseSession(pb.CloseSessionRequest(session_id=opening.session_id), timeout=HANG / 2)
            self._compare(tokens[len(ask.prompt) : len(truth)], number, whole=how == "read")

    async def _written(self, call: Any, session_id: str, tokens: list[int], draft: list[int], until: int) -> None:
        base = {"session_id": session_id, "base_length": len(tokens), "last_token": tokens[-1]}
        try:
            await call.write(pb.VerifyRequest(**base, draft_tokens=draft, run_until=until, max_step_drafts=5))
        except asyncio.InvalidStateError:
            await self._told(call)

    async def _told(self, call: Any) -> list[int]:
        """The tokens of a step. Raises what the stream ended with."""
        try:
            reply = await call.read()
        except asyncio.InvalidStateError:  # the stream has ended: its own status says why
            reply = grpc.aio.EOF
        if reply is grpc.aio.EOF:
            status = await call.code(), await call.initial_metadata(), await call.trailing_metadata()
            raise grpc.aio.AioRpcError(*status, details=await call.details())
        return list(reply.token_ids)

    async def _never_wait(self) -> None:
        """Our own client of a target that never waits: read to its end, or left in the middle."""
        number, whole = self._chance.randrange(PROMPTS), self._chance.random() < 0.7
        address, said = self._any(TARGET)[1], list[int]()
        try:
            rest = Pipeline.NEVER_WAITING, None, Persistence(10.0)
            generator, client = await connect_distributed(self._drafts, DRAFT, address, 5.0, *rest)
        except ValueError as error:
            raise TandemError("UNAVAILABLE", str(error)) from None
        try:
            async with contextlib.aclosing(generator.generate(_ask(number).request())) as events:
                async for event in events:
                    said += event.token_ids if isinstance(event, Chunk) else ()
                    if not whole and said:
                        break
        finally:
            await client.close()
        self._compare(said, number, whole)

    async def _hostile(self) -> None:
        """A structure that would take a server for itself: it is refused by its limits or enforced, or runs late."""
        (service, address), chance = self._any(), self._chance
        hostile = random_structure(chance) if chance.random() < 0.5 else chance.choice(list(HOSTILE.values()))
        try:
            sampling = SamplingParams(structure=hostile)
        except InvalidField:
            return
        request = GenerationRequest(token_ids=(65, 66), sampling=sampling, max_new_tokens=8)
        async with GenerationClient.connect(address, service) as client:
            try:
                async for _ in client.generate(request, timeout=chance.uniform(0.1, 5.0)):
                    pass
            except TandemError as error:
                if error.code not in ("INVALID_ARGUMENT", "DEADLINE_EXCEEDED"):
                    raise

    async def _cancel_open(self) -> None:
        async with self._opened(self._chance.randrange(PROMPTS)) as (target, opening):
            call = target.OpenSession(opening)
            await asyncio.sleep(self._chance.uniform(0, 0.004))
            call.cancel()

    async def _break(self) -> None:
        """A stream of rounds whose connection is gone in the middle."""
        number = self._chance.randrange(PROMPTS)
        async with self._opened(number) as (target, opening):
            await target.OpenSession(opening, timeout=HANG / 2)
            stream = target.VerifyStream()
            ask = _ask(number)
            for _ in range(3):
                try:
                    await stream.write(
                        pb.VerifyRequest(
                            session_id=opening.session_id, base_length=len(ask.prompt), last_token=ask.prompt[-1]
                        )
                    )
                except (grpc.RpcError, asyncio.InvalidStateError):  # the stream has ended: its own status says why
                    status = await stream.code(), await stream.initial_metadata(), await stream.trailing_metadata()
                    raise grpc.aio.AioRpcError(*status, details=await stream.details()) from None


async def main(arguments: argparse.Namespace) -> None:
    named = (each.replace("=", ":", 1).split(":", 2) for each in arguments.servers)
    servers = {name: (service, address) for name, service, address in named}
    counts: Counter[str] = Counter()
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    with arguments.counts.open("a") as file:

        def failed(what: dict[str, Any]) -> None:
            print(json.dumps({"failed": what}), file=file, flush=True)

        async with drafting(DRAFT) as drafts:
            chances = [random.Random(f"soak {arguments.seed} {i}") for i in range(CLIENTS)]
            clients = [SoakClient(servers, chance, counts, failed, drafts) for chance in chances]
            tasks = [asyncio.create_task(client.run(ending)) for client in clients]
            parent = os.getppid()
            while not ending.is_set() and os.getppid() == parent:  # clients of a soak that was killed end too
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ending.wait(), 0.5)
                print(json.dumps({"counts": counts}), file=file, flush=True)
            await _end(tasks, failed)


def standing(task: asyncio.Task[Any]) -> str:
    """Where a task waits: its coroutines from the outermost in, and what the innermost waits for."""
    at: Any = task.get_coro()
    places = []
    while at is not None and len(places) < 50:
        frame = next((f for n in ("cr_frame", "ag_frame", "gi_frame") if (f := getattr(at, n, None))), None)
        places.append(f"{getattr(at, '__qualname__', at)}:{frame.f_lineno}" if frame else repr(at)[:200])
        at = next((w for n in ("cr_await", "ag_await", "gi_yieldfrom") if (w := getattr(at, n, None))), None)
    return f"{task.get_name()} {' > '.join(places)}"


async def _end(tasks: list[asyncio.Task[None]], failed: Callable[[dict[str, Any]], None]) -> None:
    """Cancels everybody; who goes on after that is told as a failure that nothing excuses, with where it stood."""
    for _ in range(2):
        for task in tasks:
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=HANG / 6)
        for task in asyncio.all_tasks() - {asyncio.current_task()} if pending else ():
            failed(told("", "end", time.time(), f"a cancelled client goes on: {standing(task)}"))
        if not pending:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.soak_client")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--counts", type=Path, required=True)
    parser.add_argument("servers", nargs="+")
    asyncio.run(main(parser.parse_args()))
    sys.exit(0)
