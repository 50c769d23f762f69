"""Times rounds of benchmarks/round_overhead.py against a server process over loopback."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import quantile
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.verifier_client import VerifierClient
from tandem.rpc.verify_stream import RemoteVerifier
from tandem.speculation.types import Draft, ModelInfo, Request, SpeculationStats
from tandem.v1 import target_verifier_pb2 as pb
from tests.toy import VOCAB_SIZE

PROMPT_TOKENS = 64
SESSION_ROUNDS = 50  # keeps contexts short
WARM_UP_ROUNDS = 20
SEQUENCE_LENGTH = 512
GREEDY = Request()


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table."""

    part: str
    p50_ms: float
    p99_ms: float
    how: str  # timed, or left after subtraction
    what: str = ""


def direct(part: str, seconds: Sequence[float], what: str = "", how: str = "direct") -> Row:
    return Row(part, 1000 * quantile(seconds, 0.5), 1000 * quantile(seconds, 0.99), how, what)


def difference(part: str, seconds: Sequence[float], what: str = "") -> Row:
    """Returns a row of differences, each within one round."""
    return direct(part, seconds, what, "difference")


async def timed_call(work: Callable[[], Awaitable[Any]]) -> float:
    """Returns the seconds of `work`."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Round:
    """One round at the draft side, in seconds."""

    wall: float
    call: float
    server: float  # this and the next two: from the reply
    queue: float
    compute: float


class _Recording(RemoteSession):
    """Keeps the last reply to a round, and its seconds."""

    call = sent = 0.0
    reply = pb.VerifyResponse()

    def request(self, *round_: Any) -> pb.VerifyRequest:
        request, self.sent = super().request(*round_), time.perf_counter()
        return request

    def take_features(self, reply: pb.VerifyResponse) -> None:
        self.call, self.reply = time.perf_counter() - self.sent, reply
        super().take_features(reply)


async def rounds_over(address: str, info: ModelInfo, count: int, k: int) -> list[Round]:
    """Runs `count` rounds of RemoteVerifier with random, mostly rejected drafts, after a warm-up."""
    client = VerifierClient(address, info.tokenizer_sha256)
    noise = random.Random(0)
    found: list[Round] = []
    try:
        while len(found) < count + WARM_UP_ROUNDS:
            session = _Recording(client, GREEDY, SpeculationStats())
            verifier = RemoteVerifier(session, SpeculationStats())
            tokens = [noise.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
            await verifier.open(tokens)
            for _ in range(SESSION_ROUNDS):
                draft = tuple(noise.randrange(VOCAB_SIZE) for _ in range(k))
                began = time.perf_counter()
                verdict = await verifier.send(tokens, Draft(draft))
                wall = time.perf_counter() - began
                tokens += verdict.token_ids
                reply = session.reply
                found.append(
                    Round(wall, session.call, reply.server_seconds, reply.queue_seconds, reply.compute_seconds)
                )
            await verifier.close()
    finally:
        await client.close()
    return found[WARM_UP_ROUNDS : WARM_UP_ROUNDS + count]


async def empty_calls(address: str, count: int) -> list[float]:
    """Times GetModelInfo, a call without work."""
    async with GenerationClient.connect(address, "TargetVerifier") as client:
        timed = [await timed_call(client.model_info) for _ in range(count + WARM_UP_ROUNDS)]
    return timed[WARM_UP_ROUNDS:]


def round_rows(rounds: Sequence[Round]) -> list[Row]:
    """Splits rounds into four parts that add up to the whole."""
    return [
        direct("whole round", [r.wall for r in rounds], "RemoteVerifier.send, from call to Verdict"),
        difference(
            "client, around the call", [r.wall - r.call for r in rounds], "build the request, take the reply apart"
        ),
        difference(
            "gRPC and network",
            [r.call - r.server for r in rounds],
            "the call less server_seconds: both sides' stacks and serialisation, sockets, wake-ups",
        ),
        difference(
            "server handler",
            [r.server - r.queue - r.compute for r in rounds],
            "server_seconds less queue and compute: checks, session, reply, wake-up after the step",
        ),
        direct("queue, as reported", [r.queue for r in rounds], "handler to step: event-loop turns, hop to the thread"),
        direct("compute, as reported", [r.compute for r in rounds], "the step itself, timed on the device thread"),
    ]
