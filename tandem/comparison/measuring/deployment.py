"""Starts the servers of a comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tandem.comparison.links.link import DelayLink
from tandem.comparison.measuring import architectures as arch
from tandem.comparison.measuring.commands import (
    asking_command,
    beside_command,
    proposing_command,
    target_command,
    worker_command,
)
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.measuring.vllm import version_at
from tandem.speculation.types import ModelInfo

T = TypeVar("T")
DISTRIBUTED = (arch.DISTRIBUTED, arch.PIPELINED, arch.NEVER_WAITING, arch.HEADED)
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
        deployment.beside(arch.LOOKUP),
        deployment.beside(arch.FUSED),
        deployment.width_1(),
        deployment.openai(),
    )
    found = [endpoint for group in groups for endpoint in group]
    found += await deployment.remote_draft(found)
    return in_report_order(config, found)


def in_report_order(config: ComparisonConfig, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    order = list(config.architectures)
    if arch.AUTOREGRESSIVE.name in order:
        order.insert(order.index(arch.AUTOREGRESSIVE.name), arch.WIDTH_1.name)
    return sorted(endpoints, key=lambda endpoint: order.index(endpoint.architecture.name))


@dataclass(frozen=True, slots=True)
class _Deployment:
    config: ComparisonConfig
    fleet: Fleet
    describe: Describe
    link: DelayLink | None
    turn: tuple[str, ...]

    async def _connected(self, architecture: arch.Architecture) -> Endpoint:
        address = self.config.connect[architecture.name]
        if "://" not in address or architecture == arch.OPENAI:
            return Endpoint(architecture, address, await self.describe(address, architecture.service))
        model = await self.describe(address, arch.OPENAI.service)
        base = address.rstrip("/").removesuffix("/v1")
        drafts = "" if architecture == arch.AUTOREGRESSIVE else arch.SERVED_BY_VLLM[architecture.name]
        model = replace(model, backend=await version_at(base), draft_name=drafts)
        return Endpoint(replace(architecture, service=arch.OPENAI.service, split=False), address, model, counters=base)

    async def _started(self, architecture: arch.Architecture, command: list[str], across: bool = True) -> Endpoint:
        """Starts a server. `across`: clients reach it over the link."""
        server = await self.fleet.start(architecture.name, command)
        model = await self.describe(server.address, architecture.service)
        reached = await self.link.listen(server.address) if across and self.link else None
        return Endpoint(architecture, server.address, model, server.log, reached)

    async def _one(self, architecture: arch.Architecture, start: Callable[[], Awaitable[Endpoint]]) -> list[Endpoint]:
        if architecture.name not in self.turn:
            return []
        return [await (self._connected(architecture) if architecture.name in self.config.connect else start())]

    async def beside(self, architecture: arch.Architecture) -> list[Endpoint]:
        command = beside_command(self.config, architecture.name)
        return await self._one(architecture, lambda: self._started(architecture, command))

    async def openai(self) -> list[Endpoint]:
        return [await self._connected(arch.OPENAI)] if arch.OPENAI.name in self.turn else []

    async def plain_and_distributed(self) -> list[Endpoint]:
        target = await self._target()
        groups = await _together(self._plain(target), *(self._distributed(each, target) for each in DISTRIBUTED))
        return [endpoint for group in groups for endpoint in group]

    async def _target(self) -> Endpoint | None:
        here = {name for name in self.turn if name not in self.config.connect}
        drafting, plain = here & {each.name for each in DISTRIBUTED}, arch.AUTOREGRESSIVE
        if not drafting and plain.name not in self.turn:
            return None
        if plain.name in self.config.connect:
            return await self._connected(plain)
        return await self._started(plain, target_command(self.config, drafting))

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
        return await self._started(arch.WIDTH_1, target_command(self.config, speculation_length=0))

    async def _distributed(self, worker: arch.Architecture, target: Endpoint | None) -> list[Endpoint]:
        async def start() -> Endpoint:
            assert target is not None, "a worker that is started here has a target"
            command = worker_command(self.config, worker.name, target.reached, *self._credentials_for(target))
            first = await self._started(worker, command, across=False)
            if self.config.capacity is None:
                return first
            names = [f"{worker.name}-{user}" for user in range(2, max(self.config.users) + 1)]
            more = await _together(*(self.fleet.start(name, command) for name in names))
            return replace(first, more=tuple(server.address for server in more))

        return await self._one(worker, start)

    async def remote_draft(self, found: Sequence[Endpoint]) -> list[Endpoint]:
        """Starts remote_draft, with the draft worker of `distributed` if `found` has one."""

        async def start() -> Endpoint:
            worker = next((endpoint for endpoint in found if endpoint.architecture == arch.DISTRIBUTED), None)
            if worker:
                drafter = worker.address
            else:
                drafter = (await self.fleet.start("draft_worker", proposing_command(self.config))).address
            if self.link:
                drafter = await self.link.listen(drafter, back=True)
            credentials = self._credentials_for(worker) if worker else []
            return await self._started(arch.REMOTE_DRAFT, asking_command(self.config, drafter, *credentials))

        return await self._one(arch.REMOTE_DRAFT, start)

    def _credentials_for(self, endpoint: Endpoint) -> list[str]:
        return self.config.credentials.flags() if endpoint.log is None else []


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
