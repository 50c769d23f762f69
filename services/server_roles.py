"""The server roles: loading models, building services."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tandem.clients.distributed import connect_distributed, open_remote_draft
from tandem.clients.other_engine import OtherEngine
from tandem.clients.profile import Profile
from tandem.engine.batcher import Batcher
from tandem.engine.engine import Engine
from tandem.engine.generator import Generator, RequestDefaults
from tandem.engine.generators import (
    check_has_target,
    drafter_health,
    drafting_info,
    fused_generator,
    load_drafting,
    plain_generator,
)
from tandem.engine.load_models import Loaded, check_found, close, load, load_adapters, load_pair, load_unfused
from tandem.engine.model_config import ModelConfig, beside_target
from tandem.engine.prefix_cache import share_prefixes
from tandem.engine.rank_processes import RankProcesses, lose_engine_with_ranks, rank_processes, run_follower
from tandem.engine.slots import MIB, limit_kv_memory
from tandem.engine.step_watch import StepBound, StepWatch
from tandem.receipts.keys import open_keys
from tandem.rpc.channel import DRAFT, FUSED, MESSAGES, PREFILL, TARGET
from tandem.rpc.first_contact import check_peers
from tandem.rpc.request_context import prefix_scope
from tandem.runners.backends import backend_named
from tandem.runners.own_sizes import own_sizes, runs_native
from tandem.services.draft_worker import DraftWorkerService
from tandem.services.generation import GenerateMethod, GeneratingService
from tandem.services.http.service import HttpService
from tandem.services.observability.wiring import Observability
from tandem.services.prefill_worker import connect_remote_prefill, prefill
from tandem.services.receipts import Receipts
from tandem.services.role_config import RoleConfig, defaults_in_force
from tandem.services.security.call_limits import fairness_key
from tandem.services.server import HostedService, serve
from tandem.services.shutdown import Lifecycle
from tandem.services.target_verifier import TargetVerifierService
from tandem.speculation.types import ModelInfo
from tandem.v1.draft_worker_pb2_grpc import add_DraftWorkerServicer_to_server
from tandem.v1.fused_speculative_server_pb2_grpc import add_FusedSpeculativeServerServicer_to_server
from tandem.v1.target_verifier_pb2_grpc import add_TargetVerifierServicer_to_server

log = logging.getLogger("tandem.server")

Close = Callable[[], Awaitable[None]]


class ServerParts:
    def __init__(self, role: ServerRole, config: RoleConfig, others: RankProcesses) -> None:
        self.role, self.config, self.others = role, config, others
        self.lifecycle, self.batcher = Lifecycle(), Batcher(role.name)
        self.profile = Profile(role.name) if config.profile else None  # a row per request and session
        metrics, http = (config.metrics_host, config.metrics_port), config.serve.http is not None
        self.observability = Observability(role.name, *metrics, config.otlp_endpoint, http)
        self.limits = config.serve.security.limits
        folder = config.receipt_keys
        self.keys = open_keys(Path(folder), config.receipt_key_days) if folder else None

    async def choose_draft(self) -> ModelConfig:
        models = self.config.models
        if models.draft.kind == "auto" and models.draft.model is None and models.backend == "torch":
            native = await self.batcher.on_device(runs_native, models.execution)
            models, why = beside_target(models, native, self.config.prefill is not None)
            log.info("draft: %s", why)
            self.config = replace(self.config, models=models)
        return models

    async def choose_sizes(self, *models: str | None) -> RoleConfig:
        config, chosen = self.config, self.config.models
        backend = backend_named(chosen.backend)
        found = [backend.find(model) for model in models] if config.own_length else []
        heads = [each for each in found if backend.is_head(each)]
        if len(found) > len(heads) and chosen.hand_out_features is None:
            rest = [each for each in found if each not in heads]
            sizes = partial(own_sizes, chosen.execution, chosen.shape, rest, config.own_slots, bool(heads))
            shape = await self.batcher.on_device(sizes)
            self.config = replace(config, models=replace(chosen, shape=shape))
        return self.config

    def finished(self, generator: Generator, defaults: RequestDefaults) -> Generator:
        """Adds start-up time and defaults to a generator and starts its metrics."""
        generator = replace(generator, info=self.stamped(generator.info), defaults=defaults)
        self.observability.loaded(generator.info)
        generator.encoding.turns.caller = fairness_key
        return generator

    def stamped(self, info: ModelInfo) -> ModelInfo:
        key = self.keys.public if self.keys else ""
        return replace(info, startup_seconds=self.config.serve.startup.total(), receipt_key=key)

    def generate(self, generator: Generator, adapters: Callable[[], Mapping[str, str]]) -> GenerateMethod:
        reply = getattr(MESSAGES[self.role.service], f"{self.role.service}GenerateResponse")
        watch, queue = self.observability.watch, self.config.queue
        observe = self.profile.add if self.profile else None
        receipts = Receipts(self.keys, self.role.service, adapters) if self.keys else None
        settle = self.config.settle
        engine = OtherEngine("settle", settle, self.config.credentials) if settle else None
        return GenerateMethod(generator, reply, self.lifecycle, observe, queue, watch, self.limits, receipts, engine)

    async def share(self, serving: Mapping[str, Engine], *keeping: Engine, **watched: Any) -> list[Close]:
        """Shares memory and prefixes among `keeping`, and callers' turns among `serving`, by metric label; watches all.

        Connects the target to --prefill; returns closers. `watched`: more arguments of watch_parts.
        """
        if keeping and self.config.kv_cache_mb is not None:
            runners = [each.runner for each in keeping]
            limit_kv_memory(keeping[0].slots, self.batcher, runners, self.config.kv_cache_mb * MIB)
        await share_prefixes(keeping, self.config.prefixes, prefix_scope)
        for engine in serving.values():
            engine.slots.caller = fairness_key
            if engine.structures:
                engine.structures.turns.caller = fairness_key
        closing = await connect_remote_prefill(self, serving["target"]) if "target" in serving else []
        self.observability.watch_parts(self.lifecycle, self.batcher, serving, **watched)
        return closing

    def hosted(
        self,
        register: Any,
        closing: Sequence[Close],
        engine: Engine | None,
        generate: GenerateMethod | None = None,
        adapters: Callable[[], Mapping[str, str]] = dict,
        **options: Any,
    ) -> HostedService:
        """`engine` ends the server when lost. `adapters()`: those loaded now, for OpenAI clients of `generate`."""
        watch = http = None
        if engine is not None:
            options["lost"] = engine.lost
            if self.config.step_seconds != 0:
                watch = StepWatch(self.batcher, StepBound(self.config.step_seconds), engine.lose)
        if generate and self.config.serve.http:
            metrics = self.observability.page if self.observability.metrics else None
            http = HttpService(generate, adapters, self.config.serve.security.max_message_bytes, metrics)
        ready = partial(self.observability.ready, self.config.serve.startup)
        close = partial(_close, closing)
        return HostedService(self.role.service, register, http, ready=ready, close=close, watch=watch, **options)


async def _target(parts: ServerParts) -> HostedService:
    # Decodes plainly or with a DraftWorker's drafts.
    await check_peers(parts.config.draft_address, parts.config.credentials, DRAFT)
    config = await parts.choose_sizes(parts.config.models.model)
    loaded = await load(config.models, parts.batcher, config.serve.startup)
    engine = loaded.engine
    if config.models.hand_out_features is not None:
        await engine.hand_out_features(config.models.hand_out_features)
    await load_adapters(config.models, loaded)
    lose_engine_with_ranks(parts.others, engine)
    defaults = defaults_in_force(config, engine)
    generator, client = plain_generator(loaded), None
    if config.draft_address is not None:
        generator, client = await open_remote_draft(
            loaded,
            config.models.default_k,
            config.draft_address,
            config.draft_seconds,
            config.credentials,
            config.pipeline,
        )
    generator = parts.finished(generator, defaults)
    _log_target(loaded, generator.info)
    generate = parts.generate(parts.observability.traced(generator), lambda: engine.adapters.revisions)
    service = TargetVerifierService(
        engine, generator.info, generate, parts.lifecycle, config.lease_seconds, parts.limits
    )
    if parts.profile:
        service.sessions.on_end.append(parts.profile.add_session)
    sessions, health = {"verify": service.sessions}, client.health if client else None
    connected = await parts.share({"target": engine}, engine, sessions=sessions, drafter=health)
    return parts.hosted(
        partial(add_TargetVerifierServicer_to_server, service),
        [*connected, *([client.close] if client else []), partial(close, loaded, parts.batcher)],
        engine,
        generate,
        lambda: engine.adapters.revisions,
        background={"the expiry of sessions": service.checkout.expire_forever},
        busy=lambda: len(service.sessions),
    )


async def _fused(parts: ServerParts) -> HostedService:
    models = await parts.choose_draft()
    config = await parts.choose_sizes(models.model, *([models.draft_model] if models.draft_model else []))
    target, draft = await load_pair(config.models, parts.batcher, config.serve.startup)
    unfused = await load_unfused(config.models, target, parts.batcher, config.serve.startup)
    lose_engine_with_ranks(parts.others, target.engine)
    await load_adapters(config.models, target, draft)
    defaults = defaults_in_force(config, (unfused[0] if unfused else target).engine)
    health = drafter_health(draft)
    generator = fused_generator(target, draft, config.models.default_k, config.models.draft, health, unfused)
    generator = parts.finished(generator, defaults)
    _log_target(target, generator.info)
    engine = target.engine
    serving = {"target": engine}
    if unfused:
        serving["target_apart"] = unfused[0].engine
        log.info("requests that need logits on the host are answered by the same models apart")
    keeping = [engine, *([draft.engine] if draft else [])]
    connected = await parts.share(serving, *keeping, drafter=health if draft else None)
    generate = parts.generate(parts.observability.traced(generator), lambda: engine.adapters.revisions)
    service: Any = GeneratingService(FUSED, generator.info, generate, engine.adapters)
    return parts.hosted(
        partial(add_FusedSpeculativeServerServicer_to_server, service),
        [*connected, partial(close, target, parts.batcher)],
        engine,
        generate,
        lambda: engine.adapters.revisions,
    )


async def _draft_worker(parts: ServerParts) -> HostedService:
    # Generate calls a TargetVerifier; Propose drafts for calling targets.
    check_found(parts.config.models)
    draft = parts.config.models.draft_model
    await check_peers(parts.config.target_address, parts.config.credentials, TARGET)
    config = await parts.choose_sizes(*([draft] if draft else []))
    drafting = await load_drafting(config.models, parts.batcher, config.serve.startup)
    generate, closing = None, list[Close]([parts.batcher.close])
    if config.target_address is None:
        check_has_target(drafting)
        info = parts.stamped(drafting_info(drafting, config.models))
        log.info("drafts with %s for targets that call it; has no target of its own", info.draft_name)
        parts.observability.loaded(info)
    else:
        generator, client = await connect_distributed(
            drafting,
            config.models,
            config.target_address,
            config.connect_seconds,
            config.pipeline,
            config.credentials,
            config.reconnect_seconds,
        )
        closing.insert(0, client.close)
        generator = parts.finished(generator, defaults_in_force(config))
        info = generator.info
        log.info("drafts with %s for %s at %s", info.draft_name, info.model_name, client.address)
        generate = parts.generate(generator, lambda: dict(info.adapters))
    service = DraftWorkerService(info, generate, drafting, parts.lifecycle, config.lease_seconds, parts.limits)
    engine = drafting.draft.engine if drafting.draft else None
    if engine:
        engine.vital = True
    sessions, health = {"propose": service.sessions}, drafting.health if engine else None
    engines = [engine] if engine else []
    await parts.share(dict(draft=engine) if engine else {}, *engines, sessions=sessions, drafter=health)
    return parts.hosted(
        partial(add_DraftWorkerServicer_to_server, service),
        closing,
        engine,
        generate,
        lambda: dict(info.adapters),
        busy=lambda: len(service.sessions),
    )


@dataclass(frozen=True, slots=True)
class ServerRole:
    """How a role is built and named. `ranks`: may split its model over processes; `drafts`: which also load a draft."""

    name: str
    service: str
    build: Callable[[ServerParts], Awaitable[HostedService]]
    ranks: bool = False
    drafts: bool = False


ROLES = {
    role.name: role
    for role in (
        ServerRole("target", TARGET, _target, ranks=True),
        ServerRole("fused_target", FUSED, _fused, ranks=True, drafts=True),
        ServerRole("draft_worker", DRAFT, _draft_worker),
        ServerRole("prefill", PREFILL, prefill),
    )
}


async def _close(closing: Sequence[Close]) -> None:
    for each in closing:
        await each()


def _log_target(loaded: Loaded, info: ModelInfo) -> None:
    log.info(
        "%s: %s on %s, %d slots of %d tokens, up to %d draft tokens by %s",
        info.model_name,
        info.dtype,
        info.device,
        info.kv_slots,
        info.max_sequence_length,
        info.max_speculation_length,
        info.draft_name or "any client",
    )
    shapes = loaded.runner.shapes
    if shapes.note:
        bits = shapes.note
    elif shapes.bit_exact:
        bits = f"logits are identical in all {shapes.count} step shapes"
    elif shapes.count > 1:
        bits = (
            f"--fast uses {shapes.count} step shapes whose last bits differ: outputs may differ from plain decoding's "
        )
        bits += "at ties, and depend on concurrent requests; without --fast there is one shape"
    else:
        bits = "logits differ between prefill and decode on this device; outputs may differ at ties"
    log.log(logging.INFO if shapes.bit_exact and not shapes.note else logging.WARNING, "bits: %s", bits)


async def run_role(name: str, config: RoleConfig) -> int:
    """Runs a role of ROLES until its server ends; returns the exit code. Ranks above 0 follow rank 0."""
    role = ROLES[name]
    if not role.ranks:
        return await _run(role, config, RankProcesses())
    if config.models.ranks.follows:
        return await run_follower(config.models, drafts=role.drafts)
    with rank_processes(config.models.ranks, config.command) as others:
        return await _run(role, config, others)


async def _run(role: ServerRole, config: RoleConfig, others: RankProcesses) -> int:
    parts = ServerParts(role, config, others)
    serving = serve(config.serve, parts.lifecycle, partial(role.build, parts), parts.observability.observers)
    code = await parts.observability.during(serving)
    for path in parts.profile.write() if parts.profile else ():
        log.info("performance metrics saved to %s", path)
    stuck = parts.batcher.stuck
    if stuck:  # the device thread would keep the process alive for ever
        config.serve.ending.within(0.0, "the device thread is stuck in a step")
    return code or int(stuck)
