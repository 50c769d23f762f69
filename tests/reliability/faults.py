"""Faults by seed, injected beside the service: test-only code, never part of a server of ours.

What is injected into a call follows from (seed, client, method, number of that client's call), so a seed makes the same
faults again whatever the event loop interleaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from tandem.rpc.received_errors import TandemError
from tandem.services.statuses import to_status
from tandem.v1 import target_verifier_pb2 as pb
from tests.reliability.history import Call, History, fields_of


class Fault(enum.Enum):
    """What may happen to a call."""

    ABORT_BEFORE = "abort before"
    ABORT_AFTER = "abort after"  # applied; the caller hears UNAVAILABLE
    DROP_REPLY = "drop reply"  # applied; the caller hears nothing until its deadline
    DELAY = "delay"
    DUPLICATE = "duplicate"  # delivered twice, at once
    LATE_DUPLICATE = "late duplicate"  # a former request of the session is delivered again
    EXPIRE = "expire lease"


_UNARY = (*Fault, Fault.ABORT_AFTER)
_STREAM = (Fault.ABORT_BEFORE, Fault.ABORT_AFTER, Fault.DELAY, Fault.EXPIRE)
_GENERATE = (Fault.ABORT_BEFORE, Fault.ABORT_AFTER, Fault.DELAY)
Expire = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which call meets which fault. `rate`: share of calls; at most `in_a_row` of a client's one after another."""

    seed: int
    rate: float = 0.15
    in_a_row: int = 2
    most: int = 12
    longest_delay: float = 0.02
    only: tuple[Fault, ...] = ()  # no others; empty: all that the method can meet
    drops: float = 0.3  # share of the reply drops that stay: each costs its caller a whole deadline


@dataclass(slots=True)
class _Count:
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    in_a_row: int = 0
    faults: int = 0


class FaultInterceptor(grpc.aio.ServerInterceptor):
    """The innermost interceptor: sees what the service answers, records it, and injects what the schedule says.

    `expire(session)` lets a session's lease run out now; whether there was one that nobody used.
    """

    def __init__(self, schedule: Schedule | None, history: History, expire: Expire | None = None) -> None:
        self.schedule, self.history, self.expire = schedule, history, expire
        self._counts: dict[int, _Count] = defaultdict(_Count)
        self._clients: dict[str, int] = {}
        self._former: dict[str, list[Any]] = defaultdict(list)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None or not handler_call_details.method.startswith("/tandem.v1.") or method == "GetModelInfo":
            return handler
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method), **coders)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream, method), **coders)
        return grpc.unary_stream_rpc_method_handler(self._answers(handler.unary_stream, method), **coders)

    # --- which fault ---

    def draw(self, client: int, method: str, kinds: tuple[Fault, ...]) -> tuple[Fault | None, random.Random]:
        """The fault of this client's next call of `method`, and chance for its details."""
        count, schedule = self._counts[client], self.schedule
        count.calls[method] += 1
        chance = random.Random(f"{schedule.seed if schedule else 0}/{client}/{method}/{count.calls[method]}")
        if schedule is None or count.faults >= schedule.most or count.in_a_row >= schedule.in_a_row:
            count.in_a_row = 0
            return None, chance
        if chance.random() >= schedule.rate:
            count.in_a_row = 0
            return None, chance
        fault = chance.choice(schedule.only or kinds)
        if fault is Fault.DROP_REPLY and chance.random() >= schedule.drops:
            fault = Fault.ABORT_AFTER
        count.in_a_row += 1
        count.faults += 1
        return fault, chance

    def _client_of(self, request: Any, session: str) -> int:
        """Clients of a schedule are told apart by the first token of their prompts."""
        tokens = getattr(request, "prefix", None) or getattr(request, "tokens", None)
        if session and tokens and session not in self._clients:
            self._clients[session] = tokens[0]
        if not session and hasattr(request, "generation"):
            return next(iter(request.generation.token_ids.ids), -1)
        return self._clients.get(session, -1)

    async def _maybe_expire(self, fault: Fault | None, client: int, method: str, session: str) -> None:
        if fault is Fault.EXPIRE and self.expire and await self.expire(session):
            self.history.fault(client, method, fault.value, session)

    async def _maybe_delay(self, fault: Fault | None, call: Call, chance: random.Random) -> None:
        if fault is Fault.DELAY and self.schedule:
            self.history.fault(call.client, call.method, fault.value, call.session)
            await asyncio.sleep(chance.uniform(0, self.schedule.longest_delay))

    def _lost(self, fault: Fault, call: Call) -> TandemError:
        self.history.fault(call.client, call.method, fault.value, call.session, call=call.number)
        return TandemError("UNAVAILABLE", f"fault: {fault.value}")

    # --- one call, one reply ---

    def _unary(self, method: Any, name: str) -> Any:
        async def faulty(request: Any, context: grpc.aio.ServicerContext) -> Any:
            session = request.session_id
            client = self._client_of(request, session)
            fault, chance = self.draw(client, name, _UNARY)
            if fault is Fault.ABORT_BEFORE:
                self.history.fault(client, name, fault.value, session)
                raise TandemError("UNAVAILABLE", f"fault: {fault.value}")
            await self._maybe_expire(fault, client, name, session)
            await self._late(fault, method, name, client, session, chance, context)
            self._former[session].append(request)
            call = self.history.begin(client, name, session, request)
            with _noted_end(call):
                await self._maybe_delay(fault, call, chance)
                if fault is Fault.DUPLICATE:
                    self.history.fault(client, name, fault.value, session)
                    twin = self.history.begin(client, name, session, request)
                    return await _twice(call, twin, method, request, context)
                reply = await method(request, context)
                call.reply(reply)
            if fault is Fault.ABORT_AFTER:
                raise self._lost(fault, call)
            if fault is Fault.DROP_REPLY:
                self.history.fault(client, name, fault.value, session, call=call.number)
                await asyncio.sleep(60)  # until the caller gives up, which cancels this
            return reply

        return faulty

    async def _late(
        self,
        fault: Fault | None,
        method: Any,
        name: str,
        client: int,
        session: str,
        chance: random.Random,
        context: Any,
    ) -> None:
        """A request from before comes again; nobody hears the answer, which must change nothing."""
        former = [each for each in self._former[session] if name == "Verify" and hasattr(each, "base_length")]
        if fault is Fault.LATE_DUPLICATE and former:
            again = _copy(chance.choice(former))
            self.history.fault(client, name, fault.value, session)
            with contextlib.suppress(Exception):
                await _answered(self.history.begin(client, name, session, again), method, again, context)

    # --- streams ---

    def _stream(self, method: Any, name: str) -> Any:
        async def faulty(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            calls: list[tuple[Call, Fault | None]] = []
            run = _RunSeen()

            async def arriving() -> AsyncIterator[Any]:
                async for request in requests:
                    session = request.session_id
                    client = self._client_of(request, session)
                    fault, chance = self.draw(client, name, _STREAM)
                    await self._maybe_expire(fault, client, name, session)
                    runs = request.HasField("run_until")
                    if runs and run.begun:
                        call = run.message(request, fault)
                    else:
                        call = self.history.begin(client, name, session, request)
                        calls.append((call, fault))
                        if runs:
                            run.begun = call
                            run.message(request, None)
                    if fault is Fault.ABORT_BEFORE:
                        raise self._lost(fault, call)
                    await self._maybe_delay(fault, call, chance)
                    yield request

            try:
                async with contextlib.aclosing(method(arriving(), context)) as replies:
                    async for reply in replies:
                        if run.steps(reply):
                            for begun, _ in calls:
                                begun.note("run")  # its answers are steps
                            calls.clear()
                            call, fault = run.step(reply)
                        else:
                            call, fault = calls.pop(0)
                        call.reply(reply)
                        if fault is Fault.ABORT_AFTER:
                            raise self._lost(fault, call)
                        yield reply
            except Exception as error:
                if calls:
                    _note_end(calls.pop(0)[0], error)
                raise
            finally:
                for call, _ in calls:
                    call.note("cancelled")

        return faulty

    def _answers(self, method: Any, name: str) -> Any:
        async def faulty(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            client = self._client_of(request, "")
            fault, chance = self.draw(client, name, _GENERATE)
            call = self.history.begin(client, name, "", request)
            if fault is Fault.ABORT_BEFORE:
                call.note("cancelled")
                raise self._lost(fault, call)
            chunks = chance.randrange(1, 6)
            try:
                async with contextlib.aclosing(method(request, context)) as replies:
                    async for reply in replies:
                        call.reply(reply)
                        await self._maybe_delay(fault, call, chance)
                        yield reply
                        chunks -= 1
                        if fault is Fault.ABORT_AFTER and chunks == 0:
                            raise self._lost(fault, call)
            except BaseException as error:
                _note_end(call, error)
                raise

        return faulty


class _RunSeen:
    """Notes a run's messages, and each of its steps as a round of its own.

    `begun`: the call that began the run. Messages have its number; steps name it as their `run`.
    """

    def __init__(self) -> None:
        self.begun: Call | None = None
        self._fault: Fault | None = None

    def message(self, request: Any, fault: Fault | None) -> Call:
        """Notes a message of the run. `fault`: of the next step, if it has none yet."""
        assert self.begun
        self._fault = self._fault or fault
        self.begun.note("message", **fields_of(request))
        return self.begun

    def steps(self, reply: Any) -> bool:
        return bool(self.begun and not reply.stale and not reply.replayed)

    def step(self, reply: Any) -> tuple[Call, Fault | None]:
        begun, fault, self._fault = self.begun, self._fault, None
        assert begun
        base = reply.committed_length - len(reply.token_ids)
        asked = pb.VerifyRequest(session_id=begun.session, base_length=base, run_until=1)
        return begun.history.begin(begun.client, begun.method, begun.session, asked, run=begun.number), fault


async def _answered(call: Call, method: Any, request: Any, context: Any) -> Any:
    with _noted_end(call):
        reply = await method(request, context)
        call.reply(reply)
    return reply


async def _twice(call: Call, twin: Call, method: Any, request: Any, context: Any) -> Any:
    """The request delivered as two calls at once. Both come to their end; the first one's is the caller's."""
    with _noted_end(call), _noted_end(twin):  # a task that is cancelled before it runs notes nothing itself
        first, _ = await asyncio.gather(
            _answered(call, method, request, context),
            _answered(twin, method, _copy(request), context),
            return_exceptions=True,
        )
    if isinstance(first, BaseException):
        raise first
    return first


@contextlib.contextmanager
def _noted_end(call: Call) -> Iterator[None]:
    """Notes how a call ended that ends without a reply, wherever in its way it is."""
    try:
        yield
    except BaseException as error:
        if call.open:
            _note_end(call, error)
        raise


def _note_end(call: Call, error: BaseException) -> None:
    if isinstance(error, Exception):
        status = to_status(error)
        call.note("refusal", code=status.code, message=status.message)
    else:
        call.note("cancelled")


def _copy(request: Any) -> Any:
    copy = type(request)()
    copy.CopyFrom(request)
    return copy
