"""Measures the cost of a distributed round beyond drafting and verifying: `python -m benchmarks.round_overhead`.

Three measurements: rounds against a server process with the toy runner, whose step takes almost no time; the parts of
such a round, each run alone in this process; and rounds against the real target, where server and device share cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import Parser, positive
from benchmarks.figures import quantile
from tandem.comparison.measuring.config import DTYPES
from tandem.comparison.measuring.environment import these_versions, this_machine
from tandem.comparison.measuring.servers import Fleet
from tandem.engine.batcher import Batcher
from tandem.engine.sequences import Engine
from tandem.launch import LAUNCH
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.remote_verifier import RemoteVerifier
from tandem.rpc.verifier_client import VerifierClient
from tandem.runners.loading import CHUNK
from tandem.runners.protocol import Limits, PrefillRow, VerifyRow
from tandem.runners.toy import VOCAB_SIZE, ToyRunner
from tandem.services.lifecycle import Lifecycle
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.length import FixedLength
from tandem.speculation.loop import speculate
from tandem.speculation.stopping import Stopping, StopRules
from tandem.speculation.types import Draft, ModelInfo, SamplingParams, SpeculationStats, Verdict
from tandem.v1 import target_verifier_pb2 as pb

AIM_MS = 1.0
PROMPT_TOKENS = 64
SESSION_ROUNDS = 50
"""Rounds per session, so that contexts stay short."""
WARM_UP_ROUNDS = 20
SEQUENCE_LENGTH = 512
SESSION_ID = "0123456789abcdef0123456789abcdef"
GREEDY = SamplingParams()

DIRECT, DIFFERENCE = "direct", "difference"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table, in milliseconds. `how`: timed as it is, or what is left when others are taken off."""

    part: str
    p50_ms: float
    p99_ms: float | None
    how: str
    what: str = ""


def direct(part: str, seconds: Sequence[float], what: str = "") -> Row:
    return Row(part, 1000 * quantile(seconds, 0.5), 1000 * quantile(seconds, 0.99), DIRECT, what)


def difference(part: str, seconds: Sequence[float], what: str = "") -> Row:
    """Returns a row of differences, each taken within one round."""
    return Row(part, 1000 * quantile(seconds, 0.5), 1000 * quantile(seconds, 0.99), DIFFERENCE, what)


def of_medians(part: str, milliseconds: float, what: str = "") -> Row:
    """Returns a row for a difference of separately measured medians, which has no percentiles."""
    return Row(part, milliseconds, None, DIFFERENCE, what)


# --- rounds over loopback ---


@dataclass(frozen=True, slots=True)
class Round:
    """One round as the draft side sees it. Seconds; `server`, `queue` and `compute` are what the reply says."""

    wall: float
    call: float
    server: float
    queue: float
    compute: float


class _Recording:
    """Wraps the verifier's stub and records every Verify."""

    def __init__(self, stub: Any) -> None:
        self._stub, self.call, self.reply = stub, 0.0, pb.VerifyResponse()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def Verify(self, request: pb.VerifyRequest, **how: Any) -> pb.VerifyResponse:
        sent = time.perf_counter()
        self.reply = await self._stub.Verify(request, **how)
        self.call = time.perf_counter() - sent
        return self.reply


async def rounds_over(address: str, info: ModelInfo, count: int, k: int) -> list[Round]:
    """Runs `count` rounds of RemoteVerifier with random drafts, mostly rejected at once, after a warm-up."""
    client = VerifierClient(address, info.tokenizer_sha256)
    client.endpoint.stub = stub = _Recording(client.endpoint.stub)
    noise = random.Random(0)
    found: list[Round] = []
    try:
        while len(found) < count + WARM_UP_ROUNDS:
            verifier = RemoteVerifier(client, SpeculationStats())
            tokens = [noise.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
            await verifier.open(tokens, GREEDY)
            for _ in range(SESSION_ROUNDS):
                draft = tuple(noise.randrange(VOCAB_SIZE) for _ in range(k))
                began = time.perf_counter()
                verdict = await verifier.verify(tokens, draft)
                wall = time.perf_counter() - began
                tokens += verdict.token_ids
                reply = stub.reply
                found.append(Round(wall, stub.call, reply.server_seconds, reply.queue_seconds, reply.compute_seconds))
            await verifier.close()
    finally:
        await client.close()
    return found[WARM_UP_ROUNDS : WARM_UP_ROUNDS + count]


async def empty_calls(address: str, count: int) -> list[float]:
    """Times GetModelInfo, a call that does no work."""
    async with GenerationClient.connect(address, "TargetVerifier") as client:
        timed = [await _timed(client.model_info) for _ in range(count + WARM_UP_ROUNDS)]
    return timed[WARM_UP_ROUNDS:]


async def _timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def round_rows(rounds: Sequence[Round]) -> list[Row]:
    """Splits a round into four parts that add up to the whole in every round."""
    return [
        direct("whole round", [r.wall for r in rounds], "RemoteVerifier.verify, from call to Verdict"),
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


# --- the parts alone, in this process ---


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
    timed = [await _timed(work) for _ in range(count + WARM_UP_ROUNDS)]
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
        pb.VerifyRequest(
            session_id=SESSION_ID, base_length=300, last_token=12_344, draft_tokens=draft, report_margins=False
        ).ByteSize()

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


class _Nothing:
    """Drafts and verifies without any work."""

    async def open(self, prompt: Sequence[int], sampling: SamplingParams) -> None: ...

    async def round(self, tokens: Sequence[int], k: int, model_k: int | None = None) -> tuple[Draft, Verdict]:
        return Draft((66,) * k), Verdict((65,), 0)

    def learn(self, tokens: Sequence[int]) -> None: ...

    async def close(self) -> None: ...


async def loop_row(k: int, count: int, stream: Any, what: str) -> Row:
    """Times the speculation loop over rounds that do nothing: bookkeeping and detokenization."""
    stopping = Stopping(StopRules(count + WARM_UP_ROUNDS, frozenset({1}), frozenset(), ()), stream)
    timed: list[float] = []
    last = time.perf_counter()
    async for _ in speculate([65] * PROMPT_TOKENS, GREEDY, FixedLength(k), _Nothing(), stopping, SpeculationStats()):
        now = time.perf_counter()
        timed.append(now - last)
        last = time.perf_counter()
    return direct(f"loop and text, {what}", timed[WARM_UP_ROUNDS:], "speculate() and Stopping.push of one token")


# --- the run ---


@dataclass(frozen=True, slots=True)
class Report:
    """Returns the tables' titles and rows, and the overheads that must be below the aim."""

    tables: dict[str, list[Row]]
    overheads: dict[str, float]
    seconds: float


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="round_overhead", description=__doc__, allow_abbrev=False)
    parser.flag("--rounds", type=positive, default=500, metavar="N", help="against the toy server (default: 500)")
    parser.flag("--real-rounds", type=int, default=100, metavar="N", help="against the real target; 0: none")
    parser.flag("--speculation-length", type=positive, default=5, metavar="K", help="draft tokens a round (default: 5)")
    parser.flag("--dtype", default="auto", choices=DTYPES, help="of the real target")
    parser.flag("--threads", type=positive, help="CPU threads of the real target (default: torch's choice)")
    parser.flag("--output", type=Path, default=Path("results/round_overhead.json"), help="(default: %(default)s)")
    return parser.parse_args(argv)


@contextlib.asynccontextmanager
async def _target(name: str, k: int, *extra: str) -> AsyncIterator[tuple[str, ModelInfo]]:
    with tempfile.TemporaryDirectory(prefix="round_overhead") as logs:
        async with Fleet(Path(logs)) as fleet:
            command = [*LAUNCH, "--role", "target", "--port", "0", "--speculation_length", str(k)]
            command += ["--sequence_length", str(SEQUENCE_LENGTH)]
            server = await fleet.start(name, [*command, *extra])
            async with GenerationClient.connect(server.address, "TargetVerifier") as client:
                info = await client.model_info()
            yield server.address, info


async def measure(args: argparse.Namespace, say: Callable[[str], None]) -> Report:
    began = time.perf_counter()
    k, count = args.speculation_length, args.rounds
    say(f"{count} rounds against a server of the toy runner")
    async with _target("toy", k, "--backend", "toy") as (address, info):
        empty = await empty_calls(address, count)
        toy = await rounds_over(address, info, count, k)
    say("the parts alone")
    step = direct(
        "toy step", toy_step_seconds(k, count), "the runner's verify, called here: the compute of these rounds"
    )
    toy_rows = round_rows(toy)
    toy_rows.append(direct("empty call", empty, "GetModelInfo: gRPC's own floor, with a message of some 200 bytes"))
    toy_rows.append(step)
    toy_overhead = toy_rows[0].p50_ms - step.p50_ms
    toy_rows.append(of_medians("overhead", toy_overhead, "the whole round less the toy step"))
    tables = {
        "A round against the toy server, over loopback": toy_rows,
        "Serialisation alone": serialisation_rows(k, count),
        "The server's side alone": await server_rows(k, count),
    }
    overheads = {"toy server": toy_overhead}
    if args.real_rounds:
        real, loops, overhead = await _real(args, say)
        tables["A round against the real target, over loopback"] = real
        tables["The draft side's loop alone"] = loops
        overheads["real target"] = overhead
    return Report(tables, overheads, time.perf_counter() - began)


async def _real(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Row], list[Row], float]:
    from tandem.checkpoints.locate import find
    from tandem.engine.loading import load_tokenizer
    from tandem.runners.toy import ToyTokenizer

    k = args.speculation_length
    threads = ["--threads", str(args.threads)] if args.threads else []
    say(f"{args.real_rounds} rounds against the real target")
    async with _target("target", k, "--dtype", args.dtype, *threads) as (address, info):
        rounds = await rounds_over(address, info, args.real_rounds, k)
        empty = await empty_calls(address, args.real_rounds)
    rows = round_rows(rounds)
    rows += [
        direct("empty call", empty, "GetModelInfo of this server while its device is idle"),
        difference("overhead", [r.wall - r.compute for r in rounds], "the whole round less compute, round by round"),
    ]
    loops = [
        await loop_row(k, args.rounds, ToyTokenizer().stream(), "toy text"),
        await loop_row(k, args.rounds, load_tokenizer(find(None)).stream(), "the embedded tokenizer"),
    ]
    return rows, loops, rows[-1].p50_ms


def table_of(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for column in ("median ms", "p99 ms"):
        table.add_column(column, justify="right")
    table.add_column("measured")
    table.add_column("what it is")
    for row in rows:
        p99 = "-" if row.p99_ms is None else f"{row.p99_ms:.4f}"
        table.add_row(row.part, f"{row.p50_ms:.4f}", p99, row.how, row.what)
    return table


def document(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Returns the document that --output writes."""
    return {
        "schema_version": 1,
        "machine": asdict(this_machine()),
        "versions": asdict(these_versions()),
        "settings": {name: str(value) for name, value in vars(args).items()},
        "tables": {title: [asdict(row) for row in rows] for title, rows in report.tables.items()},
        "overheads_ms": report.overheads,
        "aim_ms": AIM_MS,
        "seconds": report.seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    report = asyncio.run(measure(args, lambda text: print(text, file=sys.stderr, flush=True)))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document(args, report), indent=1) + "\n")
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(f"machine: {this_machine()}; k = {args.speculation_length}", highlight=False)
    for title, rows in report.tables.items():
        console.print(table_of(title, rows))
    for server, overhead in report.overheads.items():
        verdict = "[green]below[/green]" if overhead < AIM_MS else "[bold red]above[/bold red]"
        console.print(
            f"overhead per round, {server}: {overhead:.3f} ms, {verdict} the aim of {AIM_MS:g} ms", highlight=False
        )
    console.print(f"took {report.seconds:.0f} s; wrote {args.output}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
