"""The server roles: what each loads and which service it hosts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tandem.clients.distributed import connect_distributed
from tandem.clients.profile import Profile
from tandem.clients.remote_draft import open_remote_draft
from tandem.engine.batcher import Batcher
from tandem.engine.drafting import Drafting, drafting_info, load_drafting
from tandem.engine.follower import run_follower
from tandem.engine.generator import Generator, RequestDefaults
from tandem.engine.generators import drafter_health, fused_generator, plain_generator
from tandem.engine.loading import Loaded, ModelConfig, close, load, load_pair
from tandem.engine.rank_processes import RankProcesses, lose_engine_with_ranks, rank_processes
from tandem.engine.sequences import Engine
from tandem.engine.slots import MOST_WAITING
from tandem.engine.step_watch import StepBound, StepWatch
from tandem.rpc.credentials import Credentials
from tandem.rpc.endpoint_pool import Persistence
from tandem.rpc.remote_drafter import PROPOSE_SECONDS
from tandem.services.draft_worker import DraftWorkerService
from tandem.services.fused_server import FusedSpeculativeServerService
from tandem.services.generation import GenerateMethod
from tandem.services.lifecycle import Lifecycle
from tandem.services.observability.calls import CallInterceptor
from tandem.services.observability.setup import Observability, ObservabilityConfig
from tandem.services.server import Hosted, ServeConfig, serve
from tandem.services.sessions.costs import Note
from tandem.services.sessions.proposals import Proposals
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.depth import Pipeline
from tandem.speculation.types import GenerationEnd, GenerationRequest, ModelInfo
from tandem.v1 import draft_worker_pb2, fused_speculative_server_pb2, target_verifier_pb2
from tandem.v1.draft_worker_pb2_grpc import add_DraftWorkerServicer_to_server
from tandem.v1.fused_speculative_server_pb2_grpc import add_FusedSpeculativeServerServicer_to_server
from tandem.v1.target_verifier_pb2_grpc import add_TargetVerifierServicer_to_server

log = logging.getLogger("tandem.server")

Build = Callable[[], Awaitable[Hosted]]
Host = Callable[[ServeConfig, Lifecycle, Build, Sequence[CallInterceptor]], Awaitable[int]]
"""Serves what is built, to an exit code: a gRPC server of ours, or somebody else's (tandem/ray_serve/replica.py)."""


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """Everything a server role needs; built and validated once.

    `draft_address`: the DraftWorker that a target asks for drafts, each within `draft_seconds`. `target_address` None:
    a DraftWorker that knows no target, and only proposes. `credentials`: what this server shows when it calls either.
    `pipeline`: whether a DraftWorker's rounds overlap.
    `reconnect_seconds`: how long its requests try to go on while no target answers. `queue`: requests that may wait.
    `step_seconds`: how long a step of the device may take; None: as its own times say, 0: no bound.
    `defaults`: what holds for Generate requests that do not say. `command`: this process's own, to start other ranks.
    """

    serve: ServeConfig
    models: ModelConfig
    target_address: str | None = "127.0.0.1:50051"
    draft_address: str | None = None
    draft_seconds: float = PROPOSE_SECONDS
    connect_seconds: float = 120.0
    lease_seconds: float = 60.0
    profile: bool = False
    pipeline: Pipeline = Pipeline.AUTO
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    reconnect_seconds: float = 60.0
    queue: int = MOST_WAITING
    credentials: Credentials = field(default_factory=Credentials)
    step_seconds: float | None = None
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for address in (self.target_address, self.draft_address):
            if address is not None:
                self.credentials.check(address)
        if not 0 <= self.queue <= MOST_WAITING:
            raise ValueError(f"queue: {self.queue} is outside 0 to {MOST_WAITING}")
        if self.step_seconds != 0:
            StepBound(self.step_seconds)
        if not self.draft_seconds > 0:
            raise ValueError(f"draft_seconds: {self.draft_seconds} is not above 0")


async def run_target(config: RoleConfig, host: Host = serve) -> int:
    """--role target: TargetVerifier. Its Generate decodes plainly, or speculates with a DraftWorker's drafts."""
    if config.models.ranks.follows:
        return await run_follower(config.models, drafts=False)
    with rank_processes(config.models.ranks, config.command) as others:
        return await _run_target(config, host, others)


async def _run_target(config: RoleConfig, host: Host, others: RankProcesses) -> int:
    lifecycle, batcher, profile = Lifecycle(), Batcher("target"), _Profiler(config, "target")
    limits = config.serve.security.limits
    seen = Observability(config.observability, "target")

    async def build() -> Hosted:
        loaded = await load(config.models, batcher, config.serve.startup)
        lose_engine_with_ranks(others, loaded.engine)
        loaded.engine.admit(config.defaults.sampling)
        closing: list[Callable[[], Awaitable[None]]] = [partial(close, loaded, batcher)]
        health = None
        if config.draft_address is None:
            generator = plain_generator(loaded)
        else:
            generator, client = await open_remote_draft(
                loaded, config.models.default_k, config.draft_address, config.draft_seconds, config.credentials
            )
            closing.insert(0, client.close)
            health = client.health
        generator = _started(generator, config)
        _log_target(loaded, generator.info)
        seen.loaded(generator.info)
        reply = target_verifier_pb2.TargetVerifierGenerateResponse
        generate = GenerateMethod(
            seen.traced(generator), reply, lifecycle, profile.observe, config.queue, seen.watch, limits
        )
        service = TargetVerifierService(
            loaded.engine, generator.info, generate, lifecycle, config.lease_seconds, limits, note=profile.session
        )
        closing.insert(0, service.stop)
        seen.look_at(lifecycle, batcher, {"target": loaded.engine.slots}, {"verify": service.sessions}, health)
        return Hosted(
            "TargetVerifier",
            partial(add_TargetVerifierServicer_to_server, service),
            background=[service.expire_forever],
            busy=lambda: len(service.sessions),
            ready=partial(seen.ready, config.serve.startup),
            close=partial(_close, closing),
            lost=loaded.engine.lost,
            watch=_watch(config, batcher, loaded.engine),
        )

    code = await seen.during(host(config.serve, lifecycle, build, [seen.interceptor]))
    return _ended(code, profile, batcher, config)


async def run_fused(config: RoleConfig, host: Host = serve) -> int:
    """--role fused_target: FusedSpeculativeServer. Both models run on one device thread."""
    if config.models.ranks.follows:
        return await run_follower(config.models, drafts=True)
    with rank_processes(config.models.ranks, config.command) as others:
        return await _run_fused(config, host, others)


async def _run_fused(config: RoleConfig, host: Host, others: RankProcesses) -> int:
    lifecycle, batcher, profile = Lifecycle(), Batcher("fused"), _Profiler(config, "fused")
    limits = config.serve.security.limits
    seen = Observability(config.observability, "fused_target")

    async def build() -> Hosted:
        target, draft = await load_pair(config.models, batcher, config.serve.startup)
        lose_engine_with_ranks(others, target.engine)
        target.engine.admit(config.defaults.sampling)
        health = drafter_health(draft)
        generator = fused_generator(target, draft, config.models.default_k, config.models.draft, health)
        generator = _started(generator, config)
        _log_target(target, generator.info)
        seen.loaded(generator.info)
        reply = fused_speculative_server_pb2.FusedSpeculativeServerGenerateResponse
        generate = GenerateMethod(
            seen.traced(generator), reply, lifecycle, profile.observe, config.queue, seen.watch, limits
        )
        service = FusedSpeculativeServerService(generator.info, generate)
        seen.look_at(lifecycle, batcher, {"target": target.engine.slots}, drafter=health if draft else None)
        register = partial(add_FusedSpeculativeServerServicer_to_server, service)
        ready, ended = partial(seen.ready, config.serve.startup), partial(close, target, batcher)
        lost, watch = target.engine.lost, _watch(config, batcher, target.engine)
        return Hosted("FusedSpeculativeServer", register, ready=ready, close=ended, lost=lost, watch=watch)

    code = await seen.during(host(config.serve, lifecycle, build, [seen.interceptor]))
    return _ended(code, profile, batcher, config)


async def run_draft_worker(config: RoleConfig, host: Host = serve) -> int:
    """--role draft_worker: DraftWorker, driving the distributed loop against a TargetVerifier, and proposing."""
    lifecycle, batcher, profile = Lifecycle(), Batcher("draft"), _Profiler(config, "distributed")
    limits = config.serve.security.limits
    seen = Observability(config.observability, "draft_worker")

    async def build() -> Hosted:
        drafting = await load_drafting(config.models, batcher, config.serve.startup)
        generate, closing = None, list[Callable[[], Awaitable[None]]]([batcher.close])
        if config.target_address is None:
            info = _stamped(drafting_info(drafting, config.models), config)
            log.info("proposes with %s for targets that ask; knows none itself", info.draft_name)
            seen.loaded(info)
        else:
            generator, client = await connect_distributed(
                drafting,
                config.models,
                config.target_address,
                config.connect_seconds,
                config.pipeline,
                config.credentials,
                Persistence(config.reconnect_seconds),
            )
            closing.insert(0, client.close)
            generator = _started(generator, config)
            info = generator.info
            log.info("drafts with %s for %s at %s", info.draft_name, info.model_name, client.address)
            seen.loaded(info)
            reply = draft_worker_pb2.DraftWorkerGenerateResponse
            generate = GenerateMethod(generator, reply, lifecycle, profile.observe, config.queue, seen.watch, limits)
        proposals = Proposals(drafting, info, lifecycle, config.lease_seconds, limits)
        slots = {"draft": drafting.draft.engine.slots} if drafting.draft else {}
        health = drafting.health if drafting.draft else None
        seen.look_at(lifecycle, batcher, slots, {"propose": proposals.sessions}, health)
        return Hosted(
            "DraftWorker",
            partial(add_DraftWorkerServicer_to_server, DraftWorkerService(info, generate, proposals)),
            background=[proposals.expire_forever],
            busy=lambda: len(proposals.sessions),
            ready=partial(seen.ready, config.serve.startup),
            close=partial(_close, closing),
            lost=_only_model(drafting),
            watch=_watch(config, batcher, drafting.draft.engine) if drafting.draft else None,
        )

    code = await seen.during(host(config.serve, lifecycle, build, [seen.interceptor]))
    return _ended(code, profile, batcher, config)


def _only_model(drafting: Drafting) -> asyncio.Event:
    """Set where its device is lost. Its running requests go on undrafted; the worker is of no use without it."""
    if drafting.draft is None:
        return asyncio.Event()
    drafting.draft.engine.vital = True
    return drafting.draft.engine.lost


def _watch(config: RoleConfig, batcher: Batcher, engine: Engine) -> StepWatch | None:
    """One for each device thread: who shares it with `engine` hangs with it."""
    return None if config.step_seconds == 0 else StepWatch(batcher, StepBound(config.step_seconds), engine.lose)


def _ended(code: int, profile: _Profiler, batcher: Batcher, config: RoleConfig) -> int:
    """The exit code. A device thread that hangs would keep the process for ever: nothing is left to wait for."""
    profile.write()
    if batcher.stuck:
        config.serve.ending.within(0.0, "the device thread hangs in a step")
    return code or int(batcher.stuck)


async def _close(closing: Sequence[Callable[[], Awaitable[None]]]) -> None:
    for each in closing:
        await each()


def _started(generator: Generator, config: RoleConfig) -> Generator:
    return replace(generator, info=_stamped(generator.info, config), defaults=config.defaults)


def _stamped(info: ModelInfo, config: RoleConfig) -> ModelInfo:
    return replace(info, startup_seconds=config.serve.startup.total())


def _log_target(loaded: Loaded, info: ModelInfo) -> None:
    log.info(
        "%s: %s on %s, %d slots of %d tokens, up to %d draft tokens by %s",
        info.model_name,
        info.dtype,
        info.device,
        info.kv_slots,
        info.max_sequence_length,
        info.max_speculation_length,
        info.draft_name or "whoever asks",
    )
    shapes = loaded.runner.shapes
    if shapes.note:
        log.warning("bits: %s", shapes.note)
    elif shapes.bit_exact and shapes.count > 1:
        log.info("bits: logits are identical in %d step shapes", shapes.count)
    elif shapes.bit_exact:
        log.info(
            "bits: logits are identical in the one shape of all steps: width %d, batch %d",
            *shapes.widths,
            *shapes.batches,
        )
    elif shapes.count > 1:
        log.warning(
            "bits: --fast uses %d step shapes whose last bits differ: outputs may leave plain decoding's at ties, "
            "and depend on who else is served; --exact uses one shape",
            shapes.count,
        )
    else:
        log.warning("bits: logits differ between prefill and decode on this device; outputs may differ at ties")


class _Profiler:
    """--profile on a server: a row for each request served and session verified, written when the server stops."""

    def __init__(self, config: RoleConfig, name: str) -> None:
        self._profile = Profile(name) if config.profile else None

    def observe(self, request: GenerationRequest, completion: GenerationEnd, seconds: float) -> None:
        if self._profile:
            self._profile.add(completion, seconds)

    @property
    def session(self) -> Note | None:
        return self._profile.add_session if self._profile else None

    def write(self) -> None:
        if self._profile:
            for path in self._profile.write():
                log.info("performance metrics saved to %s", path)
