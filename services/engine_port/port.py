"""The port of VllmEngine: clear text, for a gateway on this machine or in the same pod."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc
from grpc_health.v1 import health_pb2_grpc

from tandem.services.health import HealthService
from tandem.services.health_port import bind
from tandem.services.layers import Layer
from tandem.services.security.config import Security

Register = Callable[[grpc.aio.Server], None]


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where a server listens for gateways; `port` 0 takes a free one."""

    port: int
    host: str

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"engine_port: {self.port} is outside 0 to 65535")


class EnginePort:
    """Binds at once and answers from `start` on. Raises AddressInUse.

    The gateway has neither certificates nor tokens for workers, so callers are anonymous here. Limits hold as on the
    server's own port.
    """

    def __init__(
        self,
        address: EngineAddress,
        security: Security,
        outermost: Sequence[Layer] = (),
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._server = replace(security, tls=None, tokens=None).server(outermost, options=options)
        self.port = bind("engine_port", f"{address.host}:{address.port}", self._server.add_insecure_port)

    async def start(self, register: Register, health: HealthService) -> None:
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=0.5)


class EnginePorts:
    """A server's ports for gateways: that of its model, bound at once, and one for each adapter, bound at the start.

    A gateway takes each for a worker with a model of its own, since its requests to workers name no model. The ports of
    adapters follow the model's, or are free ones if that is 0. Raises AddressInUse.
    """

    def __init__(
        self,
        address: EngineAddress,
        security: Security,
        outermost: Sequence[Layer] = (),
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._address, self._more = address, (security, outermost, options)
        self._model = EnginePort(address, *self._more)
        self._adapters: dict[str, EnginePort] = {}

    @property
    def port(self) -> int:
        """The model's."""
        return self._model.port

    @property
    def adapters(self) -> dict[str, int]:
        """The port of each adapter."""
        return {name: port.port for name, port in self._adapters.items()}

    async def start(self, register: Register, adapters: Mapping[str, Register], health: HealthService) -> None:
        await self._model.start(register, health)
        for index, (name, registers) in enumerate(adapters.items(), 1):
            number = self._address.port + index if self._address.port else 0
            self._adapters[name] = EnginePort(replace(self._address, port=number), *self._more)
            await self._adapters[name].start(registers, health)

    async def stop(self) -> None:
        await asyncio.gather(*(port.stop() for port in (self._model, *self._adapters.values())))
