"""Starts vLLM's servers, and the draft worker that drafts for them, or connects to servers that run."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.comparison.links.link import Link
from tandem.comparison.measuring import commands
from tandem.comparison.measuring.architectures import AUTOREGRESSIVE, COMPARED, OPENAI
from tandem.comparison.measuring.config import ComparisonConfig
from tandem.comparison.measuring.deployment import Describe, Endpoint, in_report_order
from tandem.comparison.measuring.servers import Fleet
from tandem.comparison.vllm.commands import drafter_settings, environment, server_command
from tandem.comparison.vllm.probe import Found
from tandem.comparison.vllm.settings import FORMS, SERVED
from tandem.comparison.vllm.settings import of_vllm as served_by
from tandem.ports import free_port

WORKER_SLOTS = 8
"""KV slots of the draft worker: sessions of an idle vLLM end after seconds, while those of another begin."""


@dataclass(frozen=True, slots=True)
class VllmDeployment:
    """Starts the servers of the architectures of a turn. `found`: the vLLM that serves; None: all run already."""

    config: ComparisonConfig
    found: Found | None
    fleet: Fleet
    describe: Describe
    link: Link

    async def start(self, turn: tuple[str, ...]) -> list[Endpoint]:
        """Returns the endpoints in report order. Servers start one after the other: each takes all cores for it."""
        endpoints: list[Endpoint] = []
        worker = await self._worker() if set(turn) & set(FORMS) - set(self.config.connect) else ""
        for name in turn:
            connected = name in self.config.connect
            endpoints.append(await (self._connected(name) if connected else self._server(name, worker)))
        return in_report_order(self.config, endpoints)

    async def _connected(self, name: str) -> Endpoint:
        """Describes a server that runs. What it was started with is not asked: only the user says that it is `name`."""
        address = self.config.connect[name]
        model = await self.describe(address, OPENAI.service)
        if name == OPENAI.name:
            return Endpoint(OPENAI, address, model)
        base = address.rstrip("/").removesuffix("/v1")
        drafts = SERVED[name] if name != AUTOREGRESSIVE.name else ""
        model = replace(model, backend=await asyncio.to_thread(version_at, base), draft_name=drafts)
        return Endpoint(served_by(COMPARED[name]), address, model, counters=(f"{base}/metrics",))

    async def _worker(self) -> str:
        """Starts a draft worker at the near end of the link; returns where the far end reaches it."""
        config = replace(self.config, batch=self.config.slots or WORKER_SLOTS)
        command = commands.server_command(config, "draft_worker", "--propose_only")
        server = await self.fleet.start("draft_worker", command)
        return await self.link.listen(server.address, back=True)

    async def _server(self, name: str, worker: str) -> Endpoint:
        """Starts a vLLM server at the far end of the link, where its own drafts are too."""
        assert self.found is not None, "servers are started by a vLLM that was found"
        port, variables, counters = free_port(), environment(self.config.threads), list[str]()
        if name in FORMS:
            counting = free_port()
            variables |= drafter_settings(name, worker, counting)
            counters = [f"http://127.0.0.1:{counting}/metrics"]
        command = server_command(self.config, self.found.python, name, port)
        server = await self.fleet.start_other(name, command, variables, port, lambda: asyncio.to_thread(healthy, port))
        address, across = f"http://{server.address}", f"http://{await self.link.listen(server.address)}"
        model = await self.describe(address, OPENAI.service)
        drafts, k = SERVED[name] if name != AUTOREGRESSIVE.name else "", self.config.speculation_length or 0
        model = replace(
            model,
            model_name=Path(model.model_name).name,
            dtype="" if self.config.dtype == "auto" else self.config.dtype,
            device=self.found.device,
            backend=f"vLLM {self.found.version}",
            draft_name=drafts,
            max_speculation_length=k if drafts else 0,
            default_speculation_length=k if drafts else 0,
            startup_seconds=server.startup_seconds,
        )
        pages = (f"{address}/metrics", *counters)
        return Endpoint(served_by(COMPARED[name]), address, model, server.log, across, counters=pages)


def version_at(base: str) -> str:
    """Returns the name and the version of the vLLM that serves at a URL; the name alone if it says no version."""
    try:
        with urllib.request.urlopen(f"{base}/version", timeout=5) as answer:
            return f"vLLM {json.loads(answer.read(1 << 12))['version']}"
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return "vLLM"


def healthy(port: int) -> bool:
    """Whether a vLLM server on this machine answers that it is well."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
