"""The servers that are fuzzed, in a thread of their own, and the canary that must be answered correctly all along."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from hypothesis import strategies as st

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.rpc import wire
from tandem.rpc.channel import DRAFT, FUSED, MESSAGES, STUBS, TARGET
from tandem.speculation.types import MAX_DRAFTED
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability.messages import ADAPTER, LONGEST, VOCABULARY
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
                said = [
                    t for r in STUBS[service](channel).Generate(request, timeout=SECONDS) for t in r.chunk.token_ids
                ]
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
        target = STUBS[TARGET](self.channels[TARGET])
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
        yield Servers(sites, channels, loops[0])
    finally:
        for channel in channels.values():
            channel.close()
        done.set()
        thread.join(20)
    assert not failed and not thread.is_alive(), failed


BEGINNING = tuple(b"fuzzed")
TEXT = (*BEGINNING, *oracle(BEGINNING, GREEDY, LONGEST - len(BEGINNING), past_the_end=True))
FIELDS = {
    "session_id", "run_until", "draft_tokens", "distributions", "last_token", "stop_token_ids",
}  # fmt: skip
"""Fields that a refusal of a message may name."""

_token = st.sampled_from([0, 1, 255, VOCABULARY - 1]) | st.integers(0, VOCABULARY - 1)
_any_token = st.integers(0, 40).flatmap(
    lambda n: _token if n else st.sampled_from([VOCABULARY, 2**31, 2**32 - 1])
)  # fmt: skip
_length = st.integers(0, LONGEST) | st.sampled_from([0, LONGEST + 1, 2**31 - 1, 2**32 - 1])


@st.composite
def _path(draw: Any, base: int) -> list[int]:
    """Tokens after `base`: the truth for a while, then anything."""
    right = TEXT[base : base + draw(st.integers(0, 9))] if base < len(TEXT) else ()
    return [*right, *draw(st.lists(_any_token, max_size=4))]


@st.composite
def run_messages(draw: Any) -> dict[str, Any]:
    """The fields of one message. `base_length` and `last_token` fit where the truth is known, mostly."""
    base = draw(st.integers(1, LONGEST - 1) | _length)
    last = TEXT[base - 1] if 1 <= base <= len(TEXT) and draw(st.integers(0, 4)) else draw(_any_token)
    draft = draw(_path(base)) if draw(st.integers(0, 19)) else [1] * (MAX_DRAFTED + draw(st.integers(0, 1)))
    fields: dict[str, Any] = {
        "session_id": "s", "base_length": base, "last_token": last, "draft_tokens": draft,
        "run_until": draw(st.integers(1, LONGEST) | _length), "max_step_drafts": draw(st.integers(0, 6) | _length),
    }  # fmt: skip
    if not draw(st.integers(0, 9)):
        strange = st.sampled_from(
            [
                {"session_id": "another"},
                {"run_until": None},
                {"distributions": [generation_pb2.SparseDistribution(token_ids=[1], weights=[1.0])]},
                {"stop_token_ids": [1] * 300},
            ]
        )
        fields |= draw(strange)
    return fields


@dataclass(frozen=True, slots=True)
class FuzzedRun:
    """What a run said: the tokens of its steps, its status, and the field that its refusal names."""

    tokens: list[int]
    status: str
    says: str


def fuzzed_run(servers: Servers, messages: list[dict[str, Any]], begin: int, early: bool = False) -> FuzzedRun:
    """Opens a session, runs it for `begin` tokens, sends the messages, and closes it. Every step is compared.

    `early`: the run and its messages are sent before the opening.
    """
    target, name = STUBS[TARGET](servers.channels[TARGET]), uuid.uuid4().hex
    opening = pb.OpenSessionRequest(
        session_id=name, prefix=BEGINNING, prompt_length=len(BEGINNING), sampling={"temperature": 0.0}
    )
    waiting: queue.SimpleQueue[pb.VerifyRequest | None] = queue.SimpleQueue()
    first = {"base_length": len(BEGINNING), "last_token": BEGINNING[-1], "run_until": len(BEGINNING) + begin}
    first |= {"opening_sent": early}
    for fields in ({"session_id": "s", **first}, *messages):
        named = fields | ({"session_id": name} if fields["session_id"] == "s" else {})
        waiting.put(pb.VerifyRequest(**named))
    waiting.put(None)
    tokens: list[int] = []
    status, says = "OK", ""
    if not early:
        target.OpenSession(opening, timeout=SECONDS)
    replies = target.VerifyStream(_sent(waiting), timeout=SECONDS)
    if early:
        target.OpenSession(opening, timeout=SECONDS)
    try:
        for reply in replies:
            assert not reply.stale and reply.committed_length == len(BEGINNING) + len(tokens) + len(reply.token_ids)
            assert reply.accepted <= reply.drafted == min(reply.drafted, 5)
            tokens += reply.token_ids
    except grpc.RpcError as error:
        status, says = error.code().name, error.details() or ""
    servers.answered[status] += 1
    closed = target.CloseSession(pb.CloseSessionRequest(session_id=name), timeout=SECONDS)
    assert closed.closed and closed.committed_length <= LONGEST
    assert tuple(tokens) == TEXT[len(BEGINNING) : len(BEGINNING) + len(tokens)]
    return FuzzedRun(tokens, status, says)


def _sent(waiting: queue.SimpleQueue[pb.VerifyRequest | None]) -> Iterator[pb.VerifyRequest]:
    while (message := waiting.get()) is not None:
        yield message
