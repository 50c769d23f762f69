"""Structures that a hostile caller sends to a server: they cost that caller its answer, and others nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.rpc import wire
from tandem.rpc.channel import FUSED, STUBS, open_channel
from tandem.rpc.received_errors import TandemError
from tandem.rpc.request_context import PREFIX_SCOPE
from tandem.speculation.types import GenerationRequest, InvalidField, SamplingParams, Structure
from tandem.v1 import fused_speculative_server_pb2 as fused_pb
from tests.architectures import ARCHITECTURES, WAITING, serving
from tests.daily import daily
from tests.hostile_grammars import HOSTILE, LATE, PATTERNS, REGEX, SLOW, choice, late, random_structure
from tests.structure_workers import alive, resident, workers
from tests.support import GREEDY, ServerProcess, answer, ids, oracle, refusal, run, server_process, until
from tests.toy import END, ToyConfig, toy_logits

pytest.importorskip("llguidance")

PROMPT = b"abcabcabc"
WORDS = Structure(REGEX, "[a-c]{3}( [a-c]{3})*")
MOST_MORE = 48 * 2**20
"""Bytes by which a server may grow: of what one second of compiling PATTERNS takes, about half."""
WORKER_BYTES = 400 * 2**20
"""More than a worker can have by MEMORY_MIB, its Python and the toy's vocabulary included."""
STEERED = ((ord("z"), 100.0), (END, -100.0))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_process(tmp_path, "--role", "fused_target", "--draft_model", "miss=0.3", "--batch", "6") as server:
        yield server
        assert server.process.poll() is None, server.log.read_text()


@contextlib.asynccontextmanager
async def calls(server: ServerProcess) -> Any:
    """Generate of the server: yields (request, whom it is for, its deadline) -> text, or the status."""
    address = server.wait_ready()
    async with open_channel(address) as channel:
        generate = STUBS[FUSED](channel).Generate

        async def asked(request: GenerationRequest, scope: str = "", seconds: float | None = 120.0) -> bytes:
            message = fused_pb.FusedSpeculativeServerGenerateRequest(generation=wire.generation_to_wire(request))
            tokens: list[int] = []
            async for reply in generate(message, metadata=((PREFIX_SCOPE, scope),) if scope else None, timeout=seconds):
                tokens += reply.chunk.token_ids
            return bytes(token for token in tokens if token < 256)

        yield asked


def asking(structure: Structure | None = None, count: int = 24, **sampling: Any) -> GenerationRequest:
    return ids(PROMPT, count, sampling=SamplingParams(structure=structure, **sampling))


async def test_while_a_hostile_schema_is_compiled_others_get_their_answers_and_the_server_does_not_grow(
    server: ServerProcess,
) -> None:
    pid = server.process.pid

    kept = set(workers(pid))
    async with calls(server) as asked:
        expected = await asked(asking(WORDS))
        plain = bytes(token for token in oracle(PROMPT, GREEDY, 24) if token < 256)
        assert await asked(asking()) == plain
        before = resident(pid)
        hostile = [asyncio.create_task(refusal(asked(asking(replaced(PATTERNS, i)), "mallory"))) for i in range(2)]
        await until(lambda: any(child not in kept for child in workers(pid)))
        answered = 0
        while not hostile[0].done():
            assert await asked(asking()) == plain
            assert await asked(asking(WORDS), "alice") == expected
            answered += 1
            assert await asked(asking(choice(f"no {answered}")), "alice") == f"no {answered}".encode()
            assert resident(pid) < before + MOST_MORE
            assert all(resident(each) < WORKER_BYTES for each in workers(pid))
        assert answered > 2
        for found in await asyncio.gather(*hostile):
            assert found.code == "INVALID_ARGUMENT"
            assert found.message.startswith("structure: the json_schema cannot be enforced: ")
            assert any(
                limit in found.message
                for limit in (
                    "2 s of processor time to compile",
                    "256 MiB of memory to compile",
                    "Unable to determine if regex is empty",  # llguidance's own, sometimes first
                )
            )
        assert resident(pid) < before + MOST_MORE


def replaced(structure: Structure, number: int) -> Structure:
    """The same in other words, so that it is compiled again."""
    return replace(structure, text=structure.text + " " * number)


@pytest.mark.parametrize("architecture", daily(ARCHITECTURES, 2))
async def test_it_ends_as_the_caller_s_error_in_every_architecture_and_drafters_go_on(architecture: str) -> None:
    prompts = (bytes([65, i]) for i in range(256))
    prompt = next(each for each in prompts if logit(each, ord("z")) > logit(each, END))
    async with serving(architecture) as served:
        for sampling in (SamplingParams(), SamplingParams(logit_bias=STEERED)):
            request = ids(prompt, 24, sampling=replace(sampling, structure=late(1)), speculation_length=3)
            beside = asyncio.create_task(answer(served.generate, ids(PROMPT, 60, speculation_length=3)))
            with pytest.raises((InvalidField, TandemError), match="structure: the grammar cannot be enforced: it"):
                await answer(served.generate, request)
            assert (await beside).token_ids == oracle(PROMPT, GREEDY, 60)
        got = await answer(served.generate, ids(PROMPT, 24, speculation_length=3))
        assert got.token_ids == oracle(PROMPT, GREEDY, 24)
        drafts = architecture in WAITING and architecture != "autoregressive"  # else it depends on when they come
        assert got.completion.stats.accepted or not drafts, "the draft model is still asked"


def logit(prompt: bytes, token: int) -> float:
    return float(toy_logits(list(prompt), ToyConfig())[token])


@pytest.mark.thorough
def test_a_server_that_is_killed_takes_its_workers_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        pid = server.process.pid
        async with calls(server) as asked:
            await asked(asking(WORDS))
            running = [asyncio.create_task(asked(asking(each, 60))) for each in (WORDS, SLOW)]
            await until(lambda: len(workers(pid)) >= 4)
            found = workers(pid)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not any(map(alive, found)))
            await asyncio.gather(*running, return_exceptions=True)

    with server_process(tmp_path, "--role", "fused_target", "--model", "step=0.05") as server:
        run(test())


async def fuzzed(server: ServerProcess, structures: dict[str, Structure], callers: int = 4) -> Counter[str]:
    """Asks for each; returns how many ended how. None may end as the server's fault."""
    pid, codes, waiting = server.process.pid, Counter[str](), list(structures.items())
    async with calls(server) as asked:

        async def caller(number: int) -> None:
            while waiting:
                name, structure = waiting.pop()
                steered = {"logit_bias": STEERED} if structure == LATE else {"temperature": 1.0, "seed": number}
                try:
                    await asked(asking(structure, 24, **steered), f"caller {number}")
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code().name] += 1
                    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {error.details()} {structure}"
                    assert error.details().startswith("structure: "), (name, error.details())

        before = resident(pid)
        running = [asyncio.create_task(caller(number)) for number in range(callers)]
        while not all(task.done() for task in running):
            assert all(resident(each) < WORKER_BYTES for each in workers(pid))
            await asyncio.sleep(0.2)
        await asyncio.gather(*running)
        assert resident(pid) < before + MOST_MORE
        assert await asked(asking(WORDS))
    return codes


@pytest.mark.thorough
def test_no_structure_ends_as_the_fault_of_the_server(server: ServerProcess) -> None:
    chance = random.Random(0)
    some = {name: HOSTILE[name] for name in sorted(HOSTILE) if name not in ("patterns", "intersections")}
    codes = run(fuzzed(server, some | {f"random {i}": random_structure(chance) for i in range(60)}))
    assert codes["OK"] > 40 and codes["INVALID_ARGUMENT"] > 20
