"""What tests of services, clients and models share: the oracle, servers of the toy runner here, and processes."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.checkpoints.tokenizers import Tokenizer
from tandem.clients.distributed import connect_distributed, open_remote_draft
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generator import Generator
from tandem.engine.generators import Drafting, drafting_info, fused_generator, load_drafting, plain_generator
from tandem.engine.load_models import Loaded
from tandem.engine.model_config import DraftChoice, ModelConfig
from tandem.engine.structures import Structures
from tandem.rpc import wire
from tandem.rpc.channel import DRAFT, FUSED, STUBS, TARGET, open_channel
from tandem.rpc.credentials import Credentials
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.propose_stream import DraftClient
from tandem.rpc.remote_session import RemoteSession
from tandem.rpc.verifier_client import Deadlines, VerifierClient
from tandem.rpc.verify_stream import RemoteVerifier
from tandem.runners.load_runner import Shape
from tandem.runners.protocol import Limits, Runner
from tandem.services.draft_worker import DraftWorkerService
from tandem.services.generation import GenerateMethod, GeneratingService
from tandem.services.security.access import Security
from tandem.services.sessions.table import SessionKey
from tandem.services.shutdown import Lifecycle
from tandem.services.statuses import DOMAIN
from tandem.services.target_verifier import OPENING_SECONDS, TargetVerifierService
from tandem.speculation.draws import draw
from tandem.speculation.rounds import DraftedRounds
from tandem.speculation.types import (
    Chunk,
    Draft,
    GenerationEnd,
    GenerationRequest,
    LengthPlan,
    Request,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    Verdict,
)
from tandem.speculation.verification_mode import Pipeline
from tandem.v1 import draft_worker_pb2, fused_speculative_server_pb2, target_verifier_pb2
from tandem.v1.draft_worker_pb2_grpc import add_DraftWorkerServicer_to_server
from tandem.v1.fused_speculative_server_pb2_grpc import add_FusedSpeculativeServerServicer_to_server
from tandem.v1.target_verifier_pb2_grpc import add_TargetVerifierServicer_to_server
from tests.toy import BACKEND, END, VOCAB_SIZE, ToyConfig, ToyRunner, ToyTokenizer, adapted, toy_logits

REPOSITORY = Path(__file__).resolve().parents[1]
MAIN = str(REPOSITORY / "main.py")
HANG = 60.0
"""Seconds after which what is awaited counts as hung. No test passes or fails by how fast a busy machine is."""
LEASE = 10 * HANG
"""Seconds that sites here lease for: what is freed while a test waits was not freed by its lease."""

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=7)


# --- the oracle ---


def oracle(
    prompt: Sequence[int],
    sampling: SamplingParams,
    count: int,
    config: ToyConfig | None = None,
    past_the_end: bool = False,
    memory: int | None = None,
    adapter: str = "",
) -> tuple[int, ...]:
    """What the toy target says alone: one draw after the other. `memory` limits how many tokens it sees.

    `adapter`: of a toy adapter, what it was made from.
    """
    return _oracle(tuple(prompt), sampling, count, config or ToyConfig(), past_the_end, memory, adapter)


@functools.cache  # most tests ask the same again of every architecture
def _oracle(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    count: int,
    config: ToyConfig,
    past_the_end: bool,
    memory: int | None,
    adapter: str,
) -> tuple[int, ...]:
    tokens, end = list(prompt), len(prompt) + count
    while len(tokens) < end:
        seen = tokens if memory is None else tokens[-memory:]
        seen = adapted(seen, f"toy:{adapter}") if adapter else seen
        tokens.append(draw(toy_logits(seen, config), sampling, len(tokens)))
        if tokens[-1] == END and not past_the_end:
            break
    return tuple(tokens[len(prompt) :])


# --- runners ---


class ForgetfulRunner(ToyRunner):
    """Sees only the last token, so that greedy output runs into a cycle and n-gram lookup has something to find."""

    def logits(self, slot: int, position: int) -> Any:
        return toy_logits(self._cache[slot, position : position + 1].tolist(), self.config)


def toy(
    config: ToyConfig | None = None,
    slots: int = 4,
    max_length: int = 160,
    max_draft: int = 5,
    chunk: int = 16,
    kind: Callable[..., ToyRunner] = ToyRunner,
) -> ToyRunner:
    return kind(Limits(slots, max_length, max_draft, chunk, VOCAB_SIZE), config or ToyConfig())


def engine_of(runner: Runner, batcher: Batcher, tokenizer: Tokenizer | None = None) -> Engine:
    """A target's engine, with what structured output needs."""
    ends = runner.identity.end_of_sequence_ids
    return Engine(runner, batcher, structures=Structures(tokenizer or ToyTokenizer(), runner.limits.vocab_size, ends))


# --- servers in this process ---

Interceptors = Sequence[grpc.aio.ServerInterceptor]


@dataclass
class Site:
    """A service that listens here, with everything a test may want to look at."""

    service: str
    address: str
    generator: Generator | None
    engine: Engine | None
    lifecycle: Lifecycle
    verifier: TargetVerifierService | None = None
    worker: DraftWorkerService | None = None
    method: GenerateMethod | None = None

    def client(self, credentials: Credentials | None = None) -> GenerationClient:
        return GenerationClient.connect(self.address, self.service, credentials)

    @property
    def free(self) -> int:
        assert self.engine
        return self.engine.slots.free


@contextlib.asynccontextmanager
async def listening(
    register: Callable[[grpc.aio.Server], None],
    port: int = 0,
    interceptors: Interceptors = (),
    security: Security | None = None,
) -> AsyncIterator[str]:
    """host:port of a server with what `register` adds. `interceptors` come behind the server's own."""
    security = security or Security()
    server = security.server(behind=interceptors)
    port = security.add_port(server, f"127.0.0.1:{port}")
    register(server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def target_site(
    runner: Runner | None = None,
    lease_seconds: float = LEASE,
    interceptors: Interceptors = (),
    tokenizer: Tokenizer | None = None,
    security: Security | None = None,
    features: Sequence[int] | None = None,
    opening_seconds: float = OPENING_SECONDS,
    queue: int | None = None,
    port: int = 0,
) -> AsyncIterator[Site]:
    """A TargetVerifier. `features`: after which layers it hands out hidden states; empty: the usual ones."""
    batcher, lifecycle, limits = Batcher("test-target"), Lifecycle(), security.limits if security else None
    engine = engine_of(runner or toy(), batcher, tokenizer)
    if features is not None:
        await engine.hand_out_features(features)
    generator = plain_generator(Loaded(engine, tokenizer or ToyTokenizer()))
    generate = GenerateMethod(
        generator, target_verifier_pb2.TargetVerifierGenerateResponse, lifecycle, None, queue, limits=limits
    )
    service = TargetVerifierService(engine, generator.info, generate, lifecycle, lease_seconds, limits, opening_seconds)
    expiring = asyncio.create_task(service.checkout.expire_forever())
    try:
        register = partial(add_TargetVerifierServicer_to_server, service)
        async with listening(register, port, interceptors, security) as address:
            yield Site(TARGET, address, generator, engine, lifecycle, service, method=generate)
    finally:
        expiring.cancel()
        await batcher.close()


@contextlib.asynccontextmanager
async def fused_site(
    target: Runner | None = None,
    draft: Runner | None = None,
    k: int | None = 5,
    kind: str = "model",
    interceptors: Interceptors = (),
    tokenizer: Tokenizer | None = None,
) -> AsyncIterator[Site]:
    """A FusedSpeculativeServer; without a draft runner, n-gram lookup drafts. `k` None: lengths adapt."""
    batcher, lifecycle = Batcher("test-fused"), Lifecycle()
    engine = engine_of(target or toy(), batcher, tokenizer)
    tokenizer = tokenizer or ToyTokenizer()
    drafting = Loaded(Engine(draft, batcher, vital=False), tokenizer) if draft else None
    choice = DraftChoice(kind if draft else "ngram")
    generator = fused_generator(Loaded(engine, tokenizer), drafting, k, choice)
    reply = fused_speculative_server_pb2.FusedSpeculativeServerGenerateResponse
    generate = GenerateMethod(generator, reply, lifecycle, None)
    service: Any = GeneratingService(FUSED, generator.info, generate, engine.adapters)
    try:
        register = partial(add_FusedSpeculativeServerServicer_to_server, service)
        async with listening(register, interceptors=interceptors) as address:
            yield Site(FUSED, address, generator, engine, lifecycle, method=generate)
    finally:
        await batcher.close()


def draft_config(draft: str | None, slots: int, max_length: int, k: int | None = 3, **choice: Any) -> ModelConfig:
    """A toy draft model, or n-gram lookup where `draft` is None. `choice`: fields of DraftChoice instead."""
    chosen = DraftChoice("ngram") if draft is None else DraftChoice("model", draft or "salt=0")
    chosen = DraftChoice(**choice) if choice else chosen
    return ModelConfig(shape=Shape(slots, max_length, 5), draft=chosen, backend="toy", default_k=k)


@contextlib.asynccontextmanager
async def drafting(config: ModelConfig) -> AsyncIterator[Drafting]:
    """What drafts, on a device thread of its own."""
    batcher = Batcher("test-draft")
    try:
        yield await load_drafting(config, batcher)
    finally:
        await batcher.close()


@contextlib.asynccontextmanager
async def distributed(
    target_address: str,
    draft: str | None = "",
    slots: int = 4,
    max_length: int = 160,
    pipeline: Pipeline = Pipeline.OFF,
    k: int | None = 3,
    config: ModelConfig | None = None,
    credentials: Credentials | None = None,
    connect_seconds: float = 10.0,
    reconnect_seconds: float = 10.0,
) -> AsyncIterator[tuple[Generator, VerifierClient]]:
    """The distributed loop without a server of its own, as the `draft` role runs it. `draft` None: n-gram lookup."""
    config = config or draft_config(draft, slots, max_length, k)
    async with drafting(config) as drafts:
        generator, client = await connect_distributed(
            drafts, config, target_address, connect_seconds, pipeline, credentials, reconnect_seconds
        )
        try:
            yield generator, client
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def worker_site(
    target_address: str | None,
    draft: str | None = "",
    slots: int = 4,
    max_length: int = 160,
    lease_seconds: float = LEASE,
    config: ModelConfig | None = None,
    port: int = 0,
    interceptors: Interceptors = (),
    pipeline: Pipeline = Pipeline.AUTO,
    security: Security | None = None,
    credentials: Credentials | None = None,
    reconnect_seconds: float = 10.0,
    deadlines: Deadlines | None = None,
) -> AsyncIterator[Site]:
    """A DraftWorker; without a target it only proposes."""
    lifecycle, config = Lifecycle(), config or draft_config(draft, slots, max_length)
    async with contextlib.AsyncExitStack() as stack:
        drafts = await stack.enter_async_context(drafting(config))
        generator, generate, info = None, None, drafting_info(drafts, config)
        if target_address is not None:
            generator, client = await connect_distributed(
                drafts, config, target_address, 10.0, pipeline, credentials, reconnect_seconds
            )
            client.deadlines = deadlines or client.deadlines
            stack.push_async_callback(client.close)
            generate = GenerateMethod(generator, draft_worker_pb2.DraftWorkerGenerateResponse, lifecycle, None)
            info = generator.info
        limits = security.limits if security else None
        service = DraftWorkerService(info, generate, drafts, lifecycle, lease_seconds, limits)
        register = partial(add_DraftWorkerServicer_to_server, service)
        address = await stack.enter_async_context(listening(register, port, interceptors, security))
        engine = drafts.draft.engine if drafts.draft else None
        yield Site(DRAFT, address, generator, engine, lifecycle, worker=service, method=generate)


@contextlib.asynccontextmanager
async def remote_draft(
    draft_address: str,
    target: Runner | None = None,
    seconds: float = HANG,
    tokenizer: Tokenizer | None = None,
    k: int | None = 5,
    credentials: Credentials | None = None,
    pipeline: Pipeline = Pipeline.OFF,
) -> AsyncIterator[tuple[Generator, DraftClient]]:
    """A target that drives a DraftWorker, without a server of its own."""
    batcher = Batcher("test-target")
    loaded = Loaded(engine_of(target or toy(), batcher, tokenizer), tokenizer or ToyTokenizer())
    try:
        generator, client = await open_remote_draft(loaded, k, draft_address, seconds, credentials, pipeline)
        try:
            yield generator, client
        finally:
            await client.close()
    finally:
        await batcher.close()


@contextlib.asynccontextmanager
async def raw_stub(address: str, service: str = TARGET, credentials: Credentials | None = None) -> AsyncIterator[Any]:
    """The generated stub, for what no client of ours would send."""
    async with open_channel(address, credentials) as channel:
        yield STUBS[service](channel)


class Refusal(Exception):
    """A call that failed, as its status and details say."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code, self.message = error.code().name, error.details() or ""
        self.reason = self.field = ""
        self.retry_seconds: float | None = None
        status = rpc_status.from_call(error)
        for detail in status.details if status else ():
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                assert info.domain == DOMAIN
                self.reason = info.reason
            elif detail.Unpack(bad):
                (violation,) = bad.field_violations
                self.field = violation.field
            elif detail.Unpack(retry):
                self.retry_seconds = retry.retry_delay.ToTimedelta().total_seconds()
        super().__init__(f"{self.code} {self.reason} {self.field}: {self.message}")


async def refusal(call: Any) -> Refusal:
    """The refusal of a call that must fail, in the end if it is a stream."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return Refusal(error)
    raise AssertionError("the call was answered; it should have been refused")


PROMPT = list(b"the prompt, long enough for three chunks of prefill")


def opening(
    name: str = "s", prefix: Sequence[int] = PROMPT, sampling: SamplingParams = GREEDY, **rest: Any
) -> target_verifier_pb2.OpenSessionRequest:
    fields: dict[str, Any] = {"prompt_length": 1, "sampling": wire.sampling_to_wire(sampling)} | rest
    return target_verifier_pb2.OpenSessionRequest(session_id=name, prefix=prefix, **fields)


def verifying(
    tokens: Sequence[int] = PROMPT, draft: Sequence[int] = (), name: str = "s", **rest: Any
) -> target_verifier_pb2.VerifyRequest:
    """A round after `tokens`."""
    at = {"base_length": len(tokens), "last_token": tokens[-1]}
    return target_verifier_pb2.VerifyRequest(session_id=name, draft_tokens=draft, **at, **rest)


class GivenDraft:
    """A drafter that proposes what it is given."""

    draft = Draft()

    async def open(self, prompt: Sequence[int]) -> None: ...

    async def propose(self, tokens: Sequence[int], plan: LengthPlan) -> Draft:
        return self.draft

    async def close(self) -> None: ...


class RemoteRounds:
    """A session of a remote target, and its rounds one at a time."""

    def __init__(self, session: RemoteSession, stats: SpeculationStats) -> None:
        self._drafter = GivenDraft()
        self._rounds = DraftedRounds(RemoteVerifier(session, stats), self._drafter, stats=stats)
        self.open, self.close = self._rounds.open, self._rounds.close

    async def verify(self, tokens: Sequence[int], draft: Sequence[int], distributions: Sequence[Any] = ()) -> Verdict:
        self._drafter.draft = Draft(tuple(draft), distributions=tuple(distributions))
        return (await self._rounds.round(tokens, LengthPlan(len(draft), len(draft))))[1]


def remote_verifier(client: VerifierClient, request: Request, stats: SpeculationStats | None = None) -> RemoteRounds:
    stats = stats or SpeculationStats()
    return RemoteRounds(RemoteSession(client, request, stats), stats)


def forbid_imports(monkeypatch: Any, *names: str) -> None:
    """Imports of these modules, or of any of these packages, fail."""
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name in names or name.split(".")[0] in names:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


async def with_adapters(engine: Engine | None, *names: str) -> None:
    """Gives a toy model adapters, each made from its name; red and blue if none is named."""
    assert engine is not None
    for name in names or ("red", "blue"):
        await engine.adapters.add(AdapterChoice(name, name), BACKEND.adapter)


class InFront:
    """A servicer in front of another. A Verify of its own answers streams of rounds too."""

    def __init__(self, inner: Any, methods: dict[str, Callable[..., Any]]) -> None:
        self._inner = inner
        methods = ({"VerifyStream": self._rounds} if "Verify" in methods else {}) | methods
        for name, method in methods.items():
            setattr(self, name, partial(method, inner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def _rounds(self, inner: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield await self.Verify(request, context)


def in_front(site: Site, **methods: Callable[..., Any]) -> contextlib.AbstractAsyncContextManager[str]:
    """A server in front of a site's; `methods` get its servicer, the request or requests, and the context."""
    add: Any = add_TargetVerifierServicer_to_server if site.verifier else add_DraftWorkerServicer_to_server
    return listening(partial(add, InFront(site.verifier or site.worker, methods)))


async def forget(service: Any, key: SessionKey) -> None:
    """A target knows nothing of a session any more, and has freed what it held."""
    service.sessions.forget(key).sequence.close()


async def let_expire(service: Any, *sessions: Any) -> None:
    """The leases of these sessions run out now, and what they held is freed as the server would."""
    for session in sessions:
        session.expires = float("-inf")
    service.checkout.expire()


async def let_all_expire(site: Site) -> None:
    if site.verifier:
        await let_expire(site.verifier, *site.verifier.sessions)


# --- asking ---


@dataclass
class Answer:
    """Everything a stream said."""

    token_ids: tuple[int, ...]
    text: str
    margins: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...]
    completion: GenerationEnd
    finished: float


Generate = Callable[[GenerationRequest], Any]


async def answer(generate: Generate, request: GenerationRequest) -> Answer:
    chunks: list[Chunk] = []
    completion = None
    async with contextlib.aclosing(generate(request)) as events:
        async for event in events:
            assert completion is None, "the completion is the last event"
            if isinstance(event, GenerationEnd):
                completion = event
            else:
                chunks.append(event)
    assert completion is not None
    tokens = tuple(t for chunk in chunks for t in chunk.token_ids)
    assert completion.output_tokens == len(tokens)
    margins = tuple(m for chunk in chunks for m in chunk.margins)
    logprobs = tuple(each for chunk in chunks for each in chunk.logprobs)
    text = "".join(chunk.text for chunk in chunks)
    return Answer(tokens, text, margins, logprobs, completion, time.perf_counter())


def ids(prompt: Sequence[int] | bytes, count: int | None = 24, **rest: Any) -> GenerationRequest:
    return GenerationRequest(token_ids=tuple(prompt), max_new_tokens=count, **rest)


PATIENCE_SECONDS = 10 * HANG
RUN_SECONDS = 1.5 * HANG
"""No condition, and no test, is awaited for longer. Where they must fail, less is enough."""


async def until(condition: Callable[[], bool], seconds: float = HANG) -> float:
    """Waits for a condition; returns how long it took. Raises AssertionError where it hangs."""
    began = time.perf_counter()
    while not condition():
        assert time.perf_counter() - began < min(seconds, PATIENCE_SECONDS), "it did not come to pass"
        await asyncio.sleep(0.002)
    return time.perf_counter() - began


def run(test: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run under a limit of its own, which ends before pytest's does and says where the test stood."""
    return asyncio.run(asyncio.wait_for(test, RUN_SECONDS))


# --- processes ---


def command(*arguments: str) -> list[str]:
    return [sys.executable, MAIN, *arguments]


def launch(folder: Path, *arguments: str, timeout: float = 1.5 * HANG) -> subprocess.CompletedProcess[str]:
    """Runs main.py to its end, in `folder`."""
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)


def run_client(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`main.py --role client` in `folder`, but in this process."""
    return run_here(folder, "--role", "client", *arguments)


def run_here(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """main.py in `folder`, but in this process: starting another costs half a second of a core. Not to serve."""
    from tandem.cli.main import main

    before, output, errors = Path.cwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(arguments)
    finally:
        os.chdir(before)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


class ServerProcess:
    """A `main.py` server role on a free port; `program`: what runs instead of main.py, after the interpreter."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        ready_file: str = "ready.json",
        program: Sequence[str] = (MAIN,),
        python: str = sys.executable,
    ) -> None:
        self.folder, self.ready_file = folder, folder / ready_file
        self.log = folder / f"{ready_file}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, *program, *arguments, "--ready_file", str(self.ready_file)],
                cwd=folder,
                stdout=log,
                stderr=log,
                env=os.environ | ({"PYTHONPATH": str(REPOSITORY)} if python == sys.executable else {}),
            )

    def wait_ready(self, seconds: float = HANG) -> str:
        """host:port once the ready file is there."""
        give_up = time.monotonic() + seconds
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up, self.log.read_text()
            time.sleep(0.01)
        ready = json.loads(self.ready_file.read_text())
        assert ready["pid"] == self.process.pid
        self.port = ready["port"]
        return f"{ready['host']}:{ready['port']}"

    def stop(self, seconds: float = HANG) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def server_process(
    folder: Path, *arguments: str, ready_file: str = "ready.json", program: Sequence[str] = (MAIN,)
) -> Iterator[ServerProcess]:
    ours = ("--backend", "toy", "--port", "0")
    server = ServerProcess(folder, *ours, *arguments, ready_file=ready_file, program=program)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()


def role_configured(role: str, **flags: str) -> Any:
    """The configuration of a toy server, as its command line gives it, but that its end does not end this process."""
    from tandem.cli.command_line import RoleParser
    from tandem.cli.configuration import role_config
    from tandem.services.shutdown import ShutdownDeadline

    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    config = role_config(RoleParser().parse_args(["--role", role, "--backend", "toy", "--port", "0", *given]), None)
    return replace(config, serve=replace(config.serve, ending=ShutdownDeadline(None)))
