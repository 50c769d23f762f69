"""Eight clients in a process of their own that ask, leave, abandon and break off, until they are ended or killed.

    python -m tests.reliability.soak_client --seed 1 --counts FILE target:TargetVerifier=HOST:PORT ...

The file gets the counts so far, twice a second, and a line for each operation that only a disturbance excuses.
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
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc

from tandem.clients.distributed import connect_distributed
from tandem.engine.generators import Drafting
from tandem.rpc import wire
from tandem.rpc.channel import STUBS, TARGET, open_channel
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.received_errors import TandemError, from_rpc
from tandem.speculation.types import Chunk, GenerationRequest, InvalidField, SamplingParams
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import target_verifier_pb2 as pb
from tests.hostile_grammars import HOSTILE, random_structure
from tests.reliability.traffic import Ask, WireClient, WireRunClient
from tests.support import HANG, draft_config, drafting

CLIENTS, PROMPTS = 8, 40
EXPECTED = ("RESOURCE_EXHAUSTED", "CANCELLED")
LEASE = 0.5
DRAFT = draft_config("miss=0.3", CLIENTS, 96)  # drafts for the clients that drive a target that never waits


@functools.cache
def _ask(number: int) -> Ask:
    sampling = SamplingParams() if number % 2 else SamplingParams(temperature=0.9, top_k=40, seed=number)
    adapter = ("", "red", "", "blue", "")[number % 5]
    return Ask((65 + number, *range(number % 17)), sampling, 8 + number % 16, number % 6, adapter=adapter)


@functools.cache
def _expected(number: int) -> tuple[int, ...]:
    return _ask(number).expected


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """asyncio.wait_for of Python 3.11 swallows a cancellation that comes as the work ends; this does not."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        task.result()
    finally:
        task.cancel()


class SoakClient:
    """One client: an endless row of operations, by chance; every answer is compared with the truth.

    `servers`: service and address by name. `failed(server, operation, began, error, code, reason)`.
    """

    def __init__(
        self,
        servers: dict[str, tuple[str, str]],
        chance: random.Random,
        counts: Counter[str],
        failed: Callable[..., None],
        drafts: Drafting,
    ) -> None:
        self._servers, self._chance, self._counts, self._failed = servers, chance, counts, failed
        self._drafts, self._server = drafts, ""

    async def run(self, ending: asyncio.Event) -> None:
        operations = [self._ask, self._ask, self._leave, self._late, self._session, self._session, self._abandon]
        operations += [self._abandon, self._cancel_open, self._never_wait, self._hostile]
        while not ending.is_set():
            operation, began = self._chance.choice(operations), time.time()
            name = operation.__name__.strip("_")
            try:
                await within(HANG, operation())
                self._counts[name] += 1
            except (TandemError, grpc.RpcError) as error:
                failed = error if isinstance(error, TandemError) else from_rpc(error)
                if failed.code in EXPECTED:
                    self._counts["refused"] += 1
                else:
                    self._failed(self._server, name, began, str(failed), failed.code, failed.reason)
                await asyncio.sleep(failed.retry_seconds or 0.05)
            except Exception as error:  # whatever it is, a hang too, no server may bring it about
                self._failed(self._server, name, began, repr(error))
                await asyncio.sleep(0.05)

    def _any(self, service: str | None = None) -> tuple[str, str]:
        self._server = self._chance.choice([n for n, (its, _) in self._servers.items() if service in (None, its)])
        return self._servers[self._server]

    def _compare(self, got: Sequence[int], expected: Sequence[int], whole: bool) -> None:
        self._counts["tokens"] += len(got)
        self._counts["wrong"] += list(got) != list(expected if whole else expected[: len(got)])

    async def _ask(self) -> None:
        await self._generate(whole=True)

    async def _leave(self) -> None:
        await self._generate(whole=False)

    async def _generate(self, whole: bool) -> None:
        (service, address), number = self._any(), self._chance.randrange(PROMPTS)
        async with GenerationClient.connect(address, service) as client:
            await self._read(client.generate(_ask(number).request()), number, whole)

    async def _read(self, generation: Any, number: int, whole: bool) -> None:
        """Reads a generation to its end, or leaves it after some chunks."""
        got, chunks = list[int](), self._chance.randrange(1, 5)
        async with contextlib.aclosing(generation) as events:
            async for event in events:
                got += event.token_ids if isinstance(event, Chunk) else ()
                chunks -= 1
                if not whole and chunks == 0:
                    break
        self._compare(got, _expected(number), whole)

    async def _late(self) -> None:
        """A request whose deadline may pass anywhere: before it is admitted, in its prompt, between rounds."""
        (service, address), number = self._any(), self._chance.randrange(PROMPTS)
        async with GenerationClient.connect(address, service) as client:
            try:
                async for _ in client.generate(_ask(number).request(), timeout=self._chance.uniform(0.001, 0.1)):
                    pass
            except TandemError as error:
                self._compare(error.produced, _expected(number), whole=False)
                if error.code != "DEADLINE_EXCEEDED":
                    raise

    @contextlib.asynccontextmanager
    async def _wire(self) -> Any:
        """A client of rounds, of a stream of them, or of a run, that is none of ours."""
        number, patience = self._chance.randrange(PROMPTS), {"patience": 400, "pause": 0.05}
        async with open_channel(self._any(TARGET)[1]) as channel:
            target, chance = STUBS[TARGET](channel), random.Random(self._chance.random())
            kind: Any = chance.choice(
                [
                    WireRunClient,
                    functools.partial(WireClient, streams=True),
                    functools.partial(WireClient, streams=False),
                ]
            )
            yield kind(target, _ask(number), chance, **patience), _expected(number)

    async def _session(self) -> None:
        async with self._wire() as (client, expected):
            ended = await client.run()
            code, _, message = ended.error.partition(": ")
            if ended.error:
                raise TandemError(code, message) if code in EXPECTED else AssertionError(ended.error)
            self._compare(ended.tokens, expected if ended.expected is None else ended.expected, whole=True)

    async def _abandon(self) -> None:
        """A session whose client and connection are gone: its lease runs out."""
        async with self._wire() as (client, _):
            running = asyncio.create_task(client.run())
            try:
                await asyncio.wait({running}, timeout=self._chance.uniform(0, 0.05))
            finally:  # the end of the soak cancels this wait: nothing runs on over a closed channel
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _never_wait(self) -> None:
        """Our own client of a target that never waits."""
        number, address = self._chance.randrange(PROMPTS), self._any(TARGET)[1]
        try:
            rest = Pipeline.NEVER_WAITING, None, 10.0
            generator, client = await connect_distributed(self._drafts, DRAFT, address, 5.0, *rest)
        except ValueError as error:
            raise TandemError("UNAVAILABLE", str(error)) from None
        try:
            await self._read(generator.generate(_ask(number).request()), number, self._chance.random() < 0.7)
        finally:
            await client.close()

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
        ask = _ask(self._chance.randrange(PROMPTS))
        async with open_channel(self._any(TARGET)[1]) as channel:
            opening = pb.OpenSessionRequest(
                session_id=f"soak-{self._chance.randrange(2**60):x}",
                prefix=ask.prompt,
                prompt_length=1,
                sampling=wire.sampling_to_wire(ask.sampling),
            )
            call = STUBS[TARGET](channel).OpenSession(opening)
            await asyncio.sleep(self._chance.uniform(0, 0.004))
            call.cancel()


async def main(arguments: argparse.Namespace) -> None:
    named = (each.replace("=", ":", 1).split(":", 2) for each in arguments.servers)
    servers = {name: (service, address) for name, service, address in named}
    counts, ending = Counter[str](), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    with arguments.counts.open("a") as file:

        def failed(server: str, operation: str, began: float, error: str, code: str = "", reason: str = "") -> None:
            when = {"began": began, "ended": time.time()}
            about = {"server": server, "operation": operation, "error": error, "code": code, "reason": reason, **when}
            print(json.dumps({"failed": about}), file=file, flush=True)

        async with drafting(DRAFT) as drafts:
            chances = [random.Random(f"soak {arguments.seed} {i}") for i in range(CLIENTS)]
            clients = [SoakClient(servers, chance, counts, failed, drafts) for chance in chances]
            tasks = [asyncio.create_task(client.run(ending)) for client in clients]
            parent = os.getppid()
            while not ending.is_set() and os.getppid() == parent:  # clients of a soak that was killed end too
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ending.wait(), 0.5)
                print(json.dumps({"counts": counts}), file=file, flush=True)
            for task in tasks:
                task.cancel()
            _, pending = await asyncio.wait(tasks, timeout=HANG / 6)
            for task in pending:
                failed("", "end", time.time(), f"a cancelled client goes on: {task!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.soak_client")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--counts", type=Path, required=True)
    parser.add_argument("servers", nargs="+")
    asyncio.run(main(parser.parse_args()))
    sys.exit(0)
