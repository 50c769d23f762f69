"""The servers that are fuzzed, in a thread of their own, and the canary that must be answered correctly all along."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import grpc

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.rpc import wire
from tandem.rpc.channel import DRAFT, FUSED, MESSAGES, TARGET, stub
from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability.messages import ADAPTER, LONGEST
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    Site,
    fused_site,
    ids,
    let_all_expire,
    oracle,
    target_site,
    toy,
    until,
    worker_site,
)
from tests.toy import BACKEND

PROMPT = b"canary"
COUNT = 12
SECONDS = 10.0
"""No answer by then is a failure."""


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the contract, from the service's descriptor."""

    service: str
    name: str
    request: Any
    streams_up: bool
    streams_down: bool

    @property
    def path(self) -> str:
        return f"/tandem.v1.{self.service}/{self.name}"


def methods() -> list[Method]:
    found = []
    for service, messages in MESSAGES.items():
        for method in messages.DESCRIPTOR.services_by_name[service].methods:
            request = getattr(messages, method.input_type.name)
            found.append(Method(service, method.name, request, method.client_streaming, method.server_streaming))
    return found


@dataclass(slots=True)
class Servers:
    """All three services of the toy runner, listening, and channels to them."""

    sites: dict[str, Site]
    channels: dict[str, grpc.Channel]
    loop: asyncio.AbstractEventLoop
    answered: Counter[str] = field(default_factory=Counter)
    closed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often a service's sessions of a name were closed: that id is used up, and what comes has another."""

    def ask(self, method: Method, message: bytes | Any) -> str:
        """The status that a message is answered with; of a stream, the last. Bytes are sent as they are."""
        raw = message if isinstance(message, bytes) else self._in_use(method, message).SerializeToString()
        channel = self.channels[method.service]
        kind = f"{'stream' if method.streams_up else 'unary'}_{'stream' if method.streams_down else 'unary'}"
        call = getattr(channel, kind)(method.path)
        status = "OK"
        try:
            reply = call(iter([raw, raw]) if method.streams_up else raw, timeout=SECONDS)
            for _ in reply if method.streams_down else ():
                pass
        except grpc.RpcError as error:
            status = error.code().name
        self.answered[status] += 1
        return status

    def _in_use(self, method: Method, message: Any) -> Any:
        """The message, for a session of an id that no close has used up."""
        named = type(message)()
        named.CopyFrom(message)
        if name := getattr(message, "session_id", ""):
            closed = self.closed[method.service, name]
            named.session_id = f"{name}.{closed}" if closed else name
            self.closed[method.service, name] += method.name == "CloseSession"
        return named

    def canary(self) -> None:
        """Every service answers a request as if nothing had happened."""
        for service, channel in self.channels.items():
            for sampling, adapter in itertools.product((GREEDY, SAMPLED), ("", ADAPTER)):
                request = getattr(MESSAGES[service], f"{service}GenerateRequest")(
                    generation=wire.generation_to_wire(ids(PROMPT, COUNT, sampling=sampling, adapter=adapter))
                )
                said = [t for r in stub(channel, service).Generate(request, timeout=SECONDS) for t in r.chunk.token_ids]
                assert tuple(said) == oracle(PROMPT, sampling, COUNT, adapter=adapter), f"{service} says {said}"
        self._canary_session()

    def nothing_is_held(self) -> None:
        """Once the leases of the sessions that messages opened have run out."""

        async def released() -> None:
            for site in self.sites.values():
                await let_all_expire(site)
                slots = site.engine.slots
                await until(lambda slots=slots: slots.free == slots.count)
                adapters = site.engine.adapters
                await until(lambda adapters=adapters: not (adapters.running or adapters.waiting))

        asyncio.run_coroutine_threadsafe(released(), self.loop).result(20)

    def _canary_session(self) -> None:
        target = stub(self.channels[TARGET], TARGET)
        truth, name = list(oracle(PROMPT, GREEDY, COUNT)), uuid.uuid4().hex
        target.OpenSession(
            pb.OpenSessionRequest(session_id=name, prefix=PROMPT, prompt_length=1, sampling={"temperature": 0.0}),
            timeout=SECONDS,
        )
        round_ = pb.VerifyRequest(
            session_id=name, base_length=len(PROMPT), last_token=PROMPT[-1], draft_tokens=truth[:3]
        )
        assert list(target.Verify(round_, timeout=SECONDS).token_ids) == truth[:4]
        assert target.CloseSession(pb.CloseSessionRequest(session_id=name), timeout=SECONDS).closed


@contextlib.contextmanager
def fuzzed_servers() -> Iterator[Servers]:
    """Servers in a thread, until the block ends. Sessions of the messages' few names always find a slot."""
    ready, done = threading.Event(), threading.Event()
    sites: dict[str, Site] = {}
    loops: list[asyncio.AbstractEventLoop] = []
    failed: list[BaseException] = []

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            target = await stack.enter_async_context(target_site(toy(slots=8, max_length=LONGEST)))
            fused = await stack.enter_async_context(
                fused_site(toy(slots=8, max_length=LONGEST), toy(slots=8, max_length=LONGEST))
            )
            worker = await stack.enter_async_context(worker_site(target.address, slots=8, max_length=LONGEST))
            for site in (target, fused, worker):
                assert site.engine
                await site.engine.adapters.add(AdapterChoice(ADAPTER, ADAPTER), BACKEND.adapter)
            sites.update({TARGET: target, FUSED: fused, DRAFT: worker})
            loops.append(asyncio.get_running_loop())
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="fuzzed servers")
    thread.start()
    assert ready.wait(HANG) and not failed, failed
    channels = {name: grpc.insecure_channel(site.address) for name, site in sites.items()}
    try:
        with patch("tandem.services.verify_runs.OPENING_COMES", 0.05):  # many announce openings that never come
            yield Servers(sites, channels, loops[0])
    finally:
        for channel in channels.values():
            channel.close()
        done.set()
        thread.join(20)
    assert not failed and not thread.is_alive(), failed
