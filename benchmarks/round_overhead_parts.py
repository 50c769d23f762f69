"""Times the parts of a round of benchmarks/round_overhead.py alone, in this process."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.round_overhead_rows import (
    GREEDY,
    PROMPT_TOKENS,
    SEQUENCE_LENGTH,
    SESSION_ROUNDS,
    WARM_UP_ROUNDS,
    Row,
    direct,
    of_medians,
    timed_call,
)
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.model_drafter import DraftSequence
from tandem.runners.loading import CHUNK
from tandem.runners.protocol import Limits, PrefillRow, VerifyRow
from tandem.runners.toy import VOCAB_SIZE, ToyRunner
from tandem.services.lifecycle import Lifecycle
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import Rounds, speculate
from tandem.speculation.stopping import Stopping, StopRules
from tandem.speculation.types import Draft, ModelInfo, SpeculationStats, Verdict
from tandem.v1 import target_verifier_pb2 as pb

DRAFTED_LENGTHS = (512, 4096, 16_384)
_KNOWN = 49_152  # token ids of a real vocabulary
SESSION_ID = "0123456789abcdef0123456789abcdef"


def _repeat(work: Callable[[], Any], count: int, inner: int = 20) -> list[float]:
    """Returns the seconds of one call of `work`, each timed over `inner` calls."""
    timed = []
    for _ in range(count):
        began = time.perf_counter()
        for _ in range(inner):
            work()
        timed.append((time.perf_counter() - began) / inner)
    return timed


async def _repeat_async(work: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    timed = [await timed_call(work) for _ in range(count + WARM_UP_ROUNDS)]
    return timed[WARM_UP_ROUNDS:]


def _messages(k: int) -> tuple[pb.VerifyRequest, pb.VerifyResponse]:
    """Builds a round of a real vocabulary, fully accepted: the largest messages."""
    draft = [12_345 + i for i in range(k)]
    request = pb.VerifyRequest(session_id=SESSION_ID, base_length=300, last_token=12_344, draft_tokens=draft)
    reply = pb.VerifyResponse(
        committed_length=301 + k,
        token_ids=[*draft, 777],
        accepted=k,
        queue_seconds=1e-4,
        compute_seconds=3e-2,
        server_seconds=3.1e-2,
    )
    return request, reply


def serialisation_rows(k: int, count: int) -> list[Row]:
    request, reply = _messages(k)
    sent, received = request.SerializeToString(), reply.SerializeToString()
    draft = tuple(request.draft_tokens)

    def build() -> None:
        pb.VerifyRequest(session_id=SESSION_ID, base_length=300, last_token=12_344, draft_tokens=draft).ByteSize()

    def take_apart() -> None:
        reply.ByteSize()
        Verdict(
            tuple(reply.token_ids), reply.accepted, reply.queue_seconds, reply.compute_seconds, tuple(reply.margins)
        )

    return [
        direct("client: build the request", _repeat(build, count)),
        direct("client: SerializeToString", _repeat(request.SerializeToString, count), f"{len(sent)} bytes"),
        direct("server: FromString", _repeat(lambda: pb.VerifyRequest.FromString(sent), count)),
        direct("server: SerializeToString", _repeat(reply.SerializeToString, count), f"{len(received)} bytes"),
        direct("client: FromString", _repeat(lambda: pb.VerifyResponse.FromString(received), count)),
        direct("client: reply to Verdict", _repeat(take_apart, count)),
    ]


class IdleRunner(ToyRunner):
    """Verifies without any work: rejects every draft."""

    def prefill(self, rows: Sequence[PrefillRow]) -> list[Any]:
        return [None] * len(rows)

    def verify(self, rows: Sequence[VerifyRow]) -> list[Any]:
        return [Verdict((65,), 0) for _ in rows]


def _limits(k: int) -> Limits:
    return Limits(4, SEQUENCE_LENGTH, k, CHUNK, VOCAB_SIZE)


async def server_rows(k: int, count: int) -> list[Row]:
    """Times the service called in this process, without a server, and then its parts."""
    batcher = Batcher("benchmark")
    loop = asyncio.get_running_loop()

    async def turns() -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    def idle(rows: Sequence[object]) -> list[object]:
        return [None] * len(rows)

    try:
        await batcher.on_device(int)
        handler = await _handler_seconds(batcher, k, count)
        steps = await _repeat_async(lambda: batcher.run(idle, None, 4), count)
        hops = await _repeat_async(lambda: batcher.on_device(int), count)
        turned = await _repeat_async(turns, count)
        bare = await _repeat_async(lambda: loop.run_in_executor(None, int), count)
    finally:
        await batcher.close()
    rows = [
        direct("handler, whole", handler, "TargetVerifierService.Verify with an idle runner, no gRPC"),
        direct("batcher, whole", steps, "Batcher.run of a step that does nothing"),
        direct("thread hop", hops, "Batcher.on_device of nothing: loop, device thread, loop"),
        direct("thread hop, any pool", bare, "asyncio's own run_in_executor, for comparison"),
        direct("event-loop turns", turned, "eight turns of an otherwise idle loop, as Batcher gives before a step"),
    ]
    medians = {row.part: row.p50_ms for row in rows}
    rows.append(
        of_medians(
            "handler without batcher",
            medians["handler, whole"] - medians["batcher, whole"],
            "checks, session, fence, reply",
        )
    )
    rest = medians["batcher, whole"] - medians["thread hop"] - medians["event-loop turns"]
    rows.append(of_medians("batcher without hop and turns", rest, "gather, hand out, wake the row's task"))
    return rows


async def _handler_seconds(batcher: Batcher, k: int, count: int) -> list[float]:
    info = ModelInfo(
        "idle", "", "", VOCAB_SIZE, SEQUENCE_LENGTH, k, kv_slots=4, dtype="float32", device="toy", backend="toy"
    )
    generate: Any = None  # only Verify is called
    service = TargetVerifierService(Engine(IdleRunner(_limits(k)), batcher), info, generate, Lifecycle())
    context: Any = None
    timed: list[float] = []
    while len(timed) < count + WARM_UP_ROUNDS:
        prefix, session_id = [65] * PROMPT_TOKENS, uuid.uuid4().hex  # the id of a closed session cannot be used again
        await service.OpenSession(
            pb.OpenSessionRequest(session_id=session_id, prefix=prefix, prompt_length=PROMPT_TOKENS), context
        )
        for i in range(SESSION_ROUNDS):
            request = pb.VerifyRequest(
                session_id=session_id, base_length=PROMPT_TOKENS + i, last_token=65, draft_tokens=[66] * k
            )
            began = time.perf_counter()
            await service.Verify(request, context)
            timed.append(time.perf_counter() - began)
        await service.CloseSession(pb.CloseSessionRequest(session_id=session_id), context)
    return timed[WARM_UP_ROUNDS : WARM_UP_ROUNDS + count]


def toy_step_seconds(k: int, count: int) -> list[float]:
    """Times the toy runner's step, the only computation in its rounds."""
    runner, noise = ToyRunner(_limits(k)), random.Random(0)
    timed: list[float] = []
    while len(timed) < count:
        tokens = [noise.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        runner.prefill([PrefillRow(0, 0, tuple(tokens))])
        for _ in range(SESSION_ROUNDS):
            draft = tuple(noise.randrange(VOCAB_SIZE) for _ in range(k))
            began = time.perf_counter()
            (verdict,) = runner.verify([VerifyRow(0, len(tokens) - 1, tokens[-1], draft, GREEDY)])
            timed.append(time.perf_counter() - began)
            assert isinstance(verdict, Verdict)
            tokens += verdict.token_ids
    return timed[:count]


async def draft_rows(count: int) -> list[Row]:
    """Times what a sequence of the draft model does around its steps, in which two drafts of five are accepted."""
    rows, noise = list[Row](), random.Random(0)
    for length in DRAFTED_LENGTHS:
        for who, only_grows in (("fused", True), ("a drafter", False)):
            engine = Engine(IdleRunner(replace(_limits(5), vocab_size=_KNOWN)), Batcher("benchmark"))
            sequence = DraftSequence(engine, 0, GREEDY, _KNOWN)
            sequence.only_grows = only_grows
            tokens = [noise.randrange(_KNOWN) for _ in range(length)]
            sequence.held = tokens[:-1]
            timed: list[float] = []
            for _ in range(count):
                draft = [noise.randrange(_KNOWN) for _ in range(5)]
                began = time.perf_counter()
                sequence.lacks(tokens)
                sequence.row(tokens, 5)
                sequence.proposed(tokens, draft)
                timed.append(time.perf_counter() - began)
                verdict = [int(str(token)) for token in draft[:2]]  # equal, but other objects, as a reply's are
                tokens += [*verdict, noise.randrange(_KNOWN)]
            rows.append(direct(f"{who}, {length:,} tokens", timed, "DraftSequence.row and proposed, without the step"))
    return rows


class _Nothing(Rounds):
    """Drafts and verifies without any work."""

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        return Draft((66,) * k), Verdict((65,), 0)

    async def close(self) -> None: ...


async def loop_row(k: int, count: int, stream: Any, what: str) -> Row:
    """Times the speculation loop over rounds that do nothing: bookkeeping and detokenization."""
    stopping = Stopping(StopRules(count + WARM_UP_ROUNDS, frozenset({1}), frozenset(), ()), stream)
    timed: list[float] = []
    last = time.perf_counter()
    async for _ in speculate([65] * PROMPT_TOKENS, FixedLength(k), _Nothing(), stopping, SpeculationStats()):
        now = time.perf_counter()
        timed.append(now - last)
        last = time.perf_counter()
    return direct(f"loop and text, {what}", timed[WARM_UP_ROUNDS:], "speculate() and Stopping.push of one token")
