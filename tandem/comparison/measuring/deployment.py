"""Starts the servers of a comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tandem.comparison.links.link import DelayLink
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.commands import feature_flags, lookup_alone, server_command, target_of, whole_of
from tandem.comparison.measuring.config import MIN_SLOTS, ComparisonConfig
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.vllm_counters import version_at
from tandem.speculation.types import ModelInfo

T = TypeVar("T")
Describe = Callable[[str, str], Awaitable[ModelInfo]]  # (address, service) -> model


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and the model of an architecture."""

    architecture: arch.Architecture
    address: str
    model: ModelInfo
    log: Path | None = None  # None: not started here
    across: str | None = None  # its address across the link
    more: tuple[str, ...] = ()  # draft workers of further clients
    counters: str | None = None  # base URL of a vLLM

    @property
    def reached(self) -> str:
        return self.across or self.address


async def deploy(
    config: ComparisonConfig,
    fleet: Fleet,
    describe: Describe,
    link: DelayLink | None = None,
    turn: tuple[str, ...] | None = None,
) -> list[Endpoint]:
    """Starts the unconnected servers of a turn (None: of all); returns the endpoints in report order."""
    deployment = _Deployment(config, fleet, describe, link, turn or config.architectures)
    groups = await _together(
        deployment.plain_and_distributed(),
        deployment.beside(arch.LOOKUP, lookup_alone(config)),
        deployment.beside(arch.FUSED, config),
        deployment.width_1(),
        deployment.openai(),
    )
    found = [endpoint for group in groups for endpoint in group]
    found += await deployment.remote_draft(found)
    return in_report_order(config, found)


def in_report_order(config: ComparisonConfig, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    order = [name for asked in config.architectures for name in _with_width_1(asked)]
    return sorted(endpoints, key=lambda endpoint: order.index(endpoint.architecture.name))


def _with_width_1(name: str) -> tuple[str, ...]:
    return (arch.WIDTH_1.name, name) if name == arch.AUTOREGRESSIVE.name else (name,)


@dataclass(frozen=True, slots=True)
class _Deployment:
    config: ComparisonConfig
    fleet: Fleet
    describe: Describe
    link: DelayLink | None
    turn: tuple[str, ...]

    def _starts(self, architecture: arch.Architecture) -> bool:
        return architecture.name in self.turn and architecture.name not in self.config.connect

    async def _connected(self, architecture: arch.Architecture) -> Endpoint:
        address = self.config.connect[architecture.name]
        if "://" not in address or architecture == arch.OPENAI:
            return Endpoint(architecture, address, await self.describe(address, architecture.service))
        model = await self.describe(address, arch.OPENAI.service)
        base = address.rstrip("/").removesuffix("/v1")
        drafts = "" if architecture == arch.AUTOREGRESSIVE else arch.SERVED_BY_VLLM[architecture.name]
        model = replace(model, backend=await version_at(base), draft_name=drafts)
        return Endpoint(replace(architecture, service=arch.OPENAI.service, split=False), address, model, counters=base)

    async def _started(self, architecture: arch.Architecture, command: list[str]) -> Endpoint:
        server = await self.fleet.start(architecture.name, command)
        model = await self.describe(server.address, architecture.service)
        return Endpoint(architecture, server.address, model, server.log)

    async def _started_across(self, architecture: arch.Architecture, command: list[str]) -> Endpoint:
        endpoint = await self._started(architecture, command)
        return replace(endpoint, across=await self.link.listen(endpoint.address)) if self.link else endpoint

    async def _one(self, architecture: arch.Architecture, start: Callable[[], Awaitable[Endpoint]]) -> list[Endpoint]:
        if architecture.name not in self.turn:
            return []
        return [await (self._connected(architecture) if architecture.name in self.config.connect else start())]

    async def beside(self, architecture: arch.Architecture, config: ComparisonConfig) -> list[Endpoint]:
        command = server_command(config, "fused_target", group=whole_of(config))
        return await self._one(architecture, lambda: self._started_across(architecture, command))

    async def openai(self) -> list[Endpoint]:
        return [await self._connected(arch.OPENAI)] if arch.OPENAI.name in self.turn else []

    async def plain_and_distributed(self) -> list[Endpoint]:
        target = await self._target()
        groups = await _together(
            self._plain(target),
            self._distributed(arch.DISTRIBUTED, target, self.config.pipeline),
            self._distributed(arch.PIPELINED, target, "on"),
            self._distributed(arch.NEVER_WAITING, target, "never-waiting"),
            self._distributed(arch.HEADED, target, self.config.pipeline),
        )
        return [endpoint for group in groups for endpoint in group]

    async def _target(self) -> Endpoint | None:
        connected = arch.AUTOREGRESSIVE.name in self.config.connect
        drafted_for = any(map(self._starts, (arch.DISTRIBUTED, arch.PIPELINED, arch.NEVER_WAITING, arch.HEADED)))
        if connected and (arch.AUTOREGRESSIVE.name in self.turn or drafted_for):
            return await self._connected(arch.AUTOREGRESSIVE)
        if self._starts(arch.AUTOREGRESSIVE) or drafted_for:
            group = target_of(self.config) if drafted_for else whole_of(self.config)
            features = self._starts(arch.HEADED) or (drafted_for and self.config.drafts_with_head)
            handing = ("--hand_out_features", self.config.hand_out_features) if features else ()
            command = server_command(self.config, "target", *handing, group=group)
            return await self._started_across(arch.AUTOREGRESSIVE, command)
        return None

    async def _plain(self, target: Endpoint | None) -> list[Endpoint]:
        if target is None or arch.AUTOREGRESSIVE.name not in self.turn:
            return []
        if arch.WIDTH_1.name in self.config.connect:
            return [target, await self._connected(arch.WIDTH_1)]
        if self.config.placement or not wants_width_1(target):  # placed, it gets a turn of its own
            return [target]
        return [target, await self._started_width_1()]

    async def width_1(self) -> list[Endpoint]:
        return [await self._started_width_1()] if arch.WIDTH_1.name in self.turn else []

    async def _started_width_1(self) -> Endpoint:
        command = server_command(self.config, "target", group=whole_of(self.config), speculation_length=0)
        return await self._started_across(arch.WIDTH_1, command)

    async def _distributed(self, worker: arch.Architecture, target: Endpoint | None, pipeline: str) -> list[Endpoint]:
        async def start() -> Endpoint:
            assert target is not None, "a worker that is started here has a target"
            host, _, port = target.reached.rpartition(":")
            where = ("--target_host", host.strip("[]"), "--target_port", port, "--pipeline", pipeline)
            headed = replace(self.config, draft="eagle", draft_model=self.config.head)
            config = headed if worker == arch.HEADED else self.config
            flags = (*where, *self._credentials_for(target), *feature_flags(config))
            if self.config.capacity_ms is None:
                return await self._started(worker, self._worker_command(config, *flags))
            command = self._worker_command(replace(config, batch=config.batch or MIN_SLOTS), *flags)
            first = await self._started(worker, command)
            names = [f"{worker.name}-{user}" for user in range(2, max(self.config.users) + 1)]
            more = await _together(*(self.fleet.start(name, command) for name in names))
            return replace(first, more=tuple(server.address for server in more))

        return await self._one(worker, start)

    async def remote_draft(self, found: Sequence[Endpoint]) -> list[Endpoint]:
        """Starts remote_draft, with the draft worker of `distributed` if `found` has one."""

        async def start() -> Endpoint:
            worker = next((endpoint for endpoint in found if endpoint.architecture == arch.DISTRIBUTED), None)
            drafter = worker.address if worker else await self._proposing()
            if self.link:
                drafter = await self.link.listen(drafter, back=True)
            pipeline = "off" if self.config.pipeline == "on" else self.config.pipeline  # it has one round at a time
            credentials = self._credentials_for(worker) if worker else []
            drafting = ("--draft_host", drafter, "--pipeline", pipeline, *credentials)
            command = server_command(self.config, "target", *drafting, group=target_of(self.config))
            return await self._started_across(arch.REMOTE_DRAFT, command)

        return await self._one(arch.REMOTE_DRAFT, start)

    def _credentials_for(self, endpoint: Endpoint) -> list[str]:
        return self.config.credentials.flags() if endpoint.log is None else []

    def _worker_command(self, config: ComparisonConfig, *extra: str) -> list[str]:
        group = config.placement.draft if config.placement else None
        return server_command(config, "draft_worker", *extra, group=group)

    async def _proposing(self) -> str:
        return (await self.fleet.start("draft_worker", self._worker_command(self.config, "--propose_only"))).address


async def _together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Awaits all; an error cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def wants_width_1(target: Endpoint) -> bool:
    """Whether to start plain decoding at width 1; beside a connected target it would not be comparable."""
    return target.model.plain_width != 1 and target.log is not None


def baseline_of(endpoints: list[Endpoint]) -> Endpoint | None:
    """Returns the fastest plain decoding: at width 1 if present, else autoregressive."""
    by_name = {endpoint.architecture.name: endpoint for endpoint in endpoints}
    return by_name.get(arch.WIDTH_1.name) or by_name.get(arch.AUTOREGRESSIVE.name)


def incomparable(endpoints: list[Endpoint]) -> list[str]:
    """Returns why figures or outputs may not be comparable."""
    remarks: list[str] = []
    for field in ("weights_revision", "tokenizer_sha256", "dtype", "device"):
        values = {e.architecture.name: getattr(e.model, field) for e in endpoints if getattr(e.model, field)}
        if len(set(values.values())) > 1:
            remarks.append(f"{field} differs: " + ", ".join(f"{name} {value}" for name, value in values.items()))
    if inexact := [e.architecture.name for e in endpoints if not e.model.bit_exact]:
        remarks.append(f"not bit-exact on this device, outputs may differ where logits tie: {', '.join(inexact)}")
    return remarks
