"""AdapterAdmin service: adds, removes and lists the adapters of a running target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.engine.adapter_registry import Adapters
from tandem.services.errors import NotAllowed
from tandem.services.security.identity import caller
from tandem.speculation.types import InvalidField
from tandem.v1 import adapter_admin_pb2 as pb
from tandem.v1 import adapter_admin_pb2_grpc, generation_pb2


@dataclass(frozen=True, slots=True)
class AdapterAdminConfig:
    """`root`: the folder whose folders may be added. `admins`: the identities that may; empty: every caller may."""

    root: Path
    admins: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            raise ValueError(f"adapter_root: {self.root} is not a folder")


class AdapterAdminService(adapter_admin_pb2_grpc.AdapterAdminServicer):
    """`read`: the backend's way to read an adapter."""

    def __init__(
        self, adapters: Adapters, read: Callable[[AdapterChoice], Adapter], config: AdapterAdminConfig
    ) -> None:
        self._adapters, self._read, self._config = adapters, read, config

    async def AddAdapter(
        self, request: pb.AddAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.AddAdapterResponse:
        self._check_caller()
        try:
            folder = AdapterChoice(request.folder or request.name, "its own").name  # a name: it leads nowhere else
            choice = AdapterChoice(request.name, str(self._config.root / folder))
            revision = await self._adapters.add(choice, self._read)
        except InvalidField:
            raise
        except ValueError as error:  # what is wrong with the adapter
            raise InvalidField("adapter", str(error).removeprefix("adapters: ")) from None
        return pb.AddAdapterResponse(adapter=generation_pb2.Adapter(name=request.name, revision=revision))

    async def RemoveAdapter(
        self, request: pb.RemoveAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.RemoveAdapterResponse:
        self._check_caller()
        await self._adapters.remove(request.name)
        return pb.RemoveAdapterResponse()

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        self._check_caller()
        revisions = self._adapters.revisions.items()
        return pb.ListAdaptersResponse(adapters=[generation_pb2.Adapter(name=n, revision=r) for n, r in revisions])

    def _check_caller(self) -> None:
        if self._config.admins and caller() not in self._config.admins:
            raise NotAllowed("only the identities in --adapter_admins may administer adapters")
