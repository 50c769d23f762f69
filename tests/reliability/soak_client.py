"""Eight clients in a process of their own that ask, leave, abandon and break off, until they are told to end or killed.

    python -m tests.reliability.soak_client --seed 1 --counts FILE TargetVerifier=HOST:PORT ...

One line of JSON per second goes to the file, what was counted so far, so that a kill loses little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from clients import wire
from clients.channel import TARGET, open_channel, stub
from clients.errors import TandemError, from_rpc
from clients.generation import GenerationClient
from speculation.types import Chunk, SamplingParams
from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability.traffic import Ask
from tests.support import oracle

CLIENTS, PROMPTS = 8, 40
EXPECTED = ("RESOURCE_EXHAUSTED", "CANCELLED")


@functools.cache
def _ask(number: int) -> Ask:
    sampling = SamplingParams() if number % 2 else SamplingParams(temperature=0.9, top_k=40, seed=number)
    return Ask((65 + number, *range(number % 17)), sampling, 8 + number % 16, number % 6)


@functools.cache
def _expected(number: int) -> tuple[int, ...]:
    ask = _ask(number)
    return oracle(ask.prompt, ask.sampling, ask.count)


class SoakClient:
    """One client: an endless row of operations, by chance; everything that is answered is compared with the truth."""

    def __init__(self, servers: dict[str, str], chance: random.Random, counts: Counter[str]) -> None:
        self._servers, self._chance, self._counts = servers, chance, counts
        self._made = 0

    async def run(self) -> None:
        operations = [self._ask, self._ask, self._leave, self._session, self._abandon, self._cancel_open, self._break]
        while True:
            operation = self._chance.choice(operations)
            try:
                await asyncio.wait_for(operation(), 30)
                self._counts[operation.__name__.strip("_")] += 1
            except (TandemError, grpc.RpcError) as error:
                failed = error if isinstance(error, TandemError) else from_rpc(error)
                self._counts["refused" if failed.code in EXPECTED else f"failed: {failed}"] += 1
                await asyncio.sleep(failed.retry_seconds or 0.05)

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

    async def _generate(self, whole: bool) -> None:
        service, number = self._chance.choice(list(self._servers)), self._chance.randrange(PROMPTS)
        said: list[int] = []
        chunks = self._chance.randrange(1, 5)
        async with GenerationClient.connect(self._servers[service], service) as client:
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
        async with open_channel(self._servers[TARGET]) as channel:
            target = stub(channel, TARGET)
            opening = pb.OpenSessionRequest(
                session_id=name, prefix=ask.prompt, prompt_length=1, sampling=wire.sampling_to_wire(ask.sampling)
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
                timeout=20,
            )
            tokens += reply.token_ids
            most -= 1
        self._compare(tokens[len(ask.prompt) : len(truth)], number, whole=False)

    async def _session(self) -> None:
        number = self._chance.randrange(PROMPTS)
        async with self._opened(number) as (target, opening):
            await target.OpenSession(opening, timeout=20)
            try:
                await self._rounds(target, opening, number, 99)
            finally:
                await target.CloseSession(pb.CloseSessionRequest(session_id=opening.session_id), timeout=20)

    async def _abandon(self) -> None:
        """A session whose client is gone: its lease runs out."""
        number = self._chance.randrange(PROMPTS)
        async with self._opened(number) as (target, opening):
            await target.OpenSession(opening, timeout=20)
            await self._rounds(target, opening, number, 2)

    async def _cancel_open(self) -> None:
        async with self._opened(self._chance.randrange(PROMPTS)) as (target, opening):
            call = target.OpenSession(opening)
            await asyncio.sleep(self._chance.uniform(0, 0.004))
            call.cancel()

    async def _break(self) -> None:
        """A stream of rounds whose connection is gone in the middle."""
        number = self._chance.randrange(PROMPTS)
        async with self._opened(number) as (target, opening):
            await target.OpenSession(opening, timeout=20)
            stream = target.VerifyStream()
            ask = _ask(number)
            for _ in range(3):
                await stream.write(
                    pb.VerifyRequest(
                        session_id=opening.session_id, base_length=len(ask.prompt), last_token=ask.prompt[-1]
                    )
                )


async def main(arguments: argparse.Namespace) -> None:
    servers = dict(each.split("=") for each in arguments.servers)
    counts: Counter[str] = Counter()
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    clients = [SoakClient(servers, random.Random(f"soak {arguments.seed} {i}"), counts) for i in range(CLIENTS)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    with arguments.counts.open("a") as file:
        while not ending.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ending.wait(), 0.5)
            for task in tasks:
                if task.done():
                    counts[f"failed: {task.exception()!r}"] += 1
            print(json.dumps(counts), file=file, flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.soak_client")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--counts", type=Path, required=True)
    parser.add_argument("servers", nargs="+")
    asyncio.run(main(parser.parse_args()))
    sys.exit(0)
