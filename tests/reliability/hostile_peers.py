"""A server that lies: it stands before an honest one and changes one field of its replies, whatever the service.

Changes are made from the descriptors of the messages, so a field that is added to the contract is changed too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tandem.rpc.channel import MESSAGES
from tandem.v1 import prefill_worker_pb2
from tests.reliability.messages import is_repeated

INTEGERS = (0, 1, 9, 258, 2**31 - 1, 2**31, 2**32 - 1)
REALS = (0.0, -1.0, 1e308, math.nan, math.inf, -math.inf)
STRINGS = ("", "x", "\0\n\x1b[2J", "y" * 70_000)
MANY = 5000


@dataclass(frozen=True, slots=True)
class Change:
    """Changes one field of a reply of `method`. `path`: the field's names from the reply on."""

    method: str
    path: tuple[str, ...]
    how: str
    apply: Callable[[Any], None]

    @property
    def name(self) -> str:
        return f"{self.method}: {'.'.join(self.path)} {self.how}"


def changes(service: str, method: str) -> list[Change]:
    """Every change of a method's reply."""
    return [
        Change(method, path, how, apply) for path, how, apply in _of_message(reply_type(service, method).DESCRIPTOR)
    ]


def reply_type(service: str, method: str) -> Any:
    messages = {**MESSAGES, "PrefillWorker": prefill_worker_pb2}[service]
    return getattr(messages, messages.DESCRIPTOR.services_by_name[service].methods_by_name[method].output_type.name)


_Found = Iterator[tuple[tuple[str, ...], str, Callable[[Any], None]]]


def _of_message(descriptor: Descriptor) -> _Found:
    for one in descriptor.fields:
        for path, how, apply in _of_field(one):
            yield (one.name, *path), how, apply


def _of_field(one: FieldDescriptor) -> _Found:
    name = one.name
    if is_repeated(one):
        yield from _of_list(one)
        return
    if one.has_presence:
        yield (), "absent", lambda message: message.ClearField(name)
    if one.type == FieldDescriptor.TYPE_MESSAGE:
        for path, how, apply in _of_message(one.message_type):
            yield path, how, lambda message, apply=apply: apply(getattr(message, name))
        return
    for how, value in _values(one):
        yield (), how, lambda message, value=value: setattr(message, name, value(getattr(message, name)))


def _of_list(one: FieldDescriptor) -> _Found:
    name = one.name
    if one.type == FieldDescriptor.TYPE_MESSAGE and one.message_type.GetOptions().map_entry:
        yield (), "another entry", lambda message: getattr(message, name).update({"x" * 500: 2**32 - 1})
        return
    inside = one.message_type is one.containing_type  # messages that follow: without them it is silent, which is no lie
    if not inside:
        yield (), "empty", lambda message: message.ClearField(name)
        yield (), "one less", lambda message: getattr(message, name).__delitem__(slice(-1, None))
    yield (), "one more", lambda message: _repeat(one, message, 1)
    yield (), f"{MANY} more", lambda message: _repeat(one, message, MANY)
    if one.type == FieldDescriptor.TYPE_MESSAGE:
        for path, how, apply in () if inside else _of_message(one.message_type):  # else without end
            yield path, f"{how}, in each", lambda message, apply=apply: [apply(each) for each in getattr(message, name)]
        return
    for how, value in _values(one):
        for where, places in (("first", slice(0, 1)), ("last", slice(-1, None))):
            yield (), f"{where} {how}", lambda message, value=value, places=places: _set(message, name, places, value)


def _repeat(one: FieldDescriptor, message: Any, count: int) -> None:
    values = getattr(message, one.name)
    if one.type == FieldDescriptor.TYPE_MESSAGE:
        like = values[-1] if values else values.add()
        values.extend([like] * count)
    else:
        values.extend([values[-1] if values else type(one.default_value[:1] or _blank(one))(_blank(one))] * count)


def _blank(one: FieldDescriptor) -> Any:
    if one.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return 0.0
    return "" if one.type == FieldDescriptor.TYPE_STRING else 0


def _set(message: Any, name: str, places: slice, value: Callable[[Any], Any]) -> None:
    values = getattr(message, name)
    for i in range(len(values))[places]:
        values[i] = value(values[i])


def _values(one: FieldDescriptor) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Names of values, and what makes each of the one that is there."""
    kind = one.type
    if kind in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_UINT64):
        most = 2 ** (64 if kind == FieldDescriptor.TYPE_UINT64 else 32) - 1
        yield "+ 1", lambda was: min(was + 1, most)
        yield "- 1", lambda was: max(was - 1, 0)
        for value in {*INTEGERS, most}:
            yield str(value), lambda was, value=value: value
    elif kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        for real in REALS:
            yield str(real), lambda was, real=real: real
    elif kind == FieldDescriptor.TYPE_BOOL:
        yield "the other", lambda was: not was
    elif kind == FieldDescriptor.TYPE_ENUM:
        for number in (0, 1, 2, 77):
            yield str(number), lambda was, number=number: number
    elif kind == FieldDescriptor.TYPE_STRING:
        for text in STRINGS:
            yield f"of {len(text)}", lambda was, text=text: text
    elif kind == FieldDescriptor.TYPE_BYTES:
        yield "empty", lambda was: b""
        yield "shorter", lambda was: was[:-1]
        yield "longer", lambda was: was + b"\x7f"
        yield "twice", lambda was: was + was
        yield "all ones", lambda was: b"\xff" * len(was)
        yield "a megabyte", lambda was: bytes(2**20)
    else:
        raise AssertionError(f"{one.full_name}: this kind of field is not known here")


@dataclass
class Liar:
    """Forwards every call to an honest server. From the `after`th reply of the change's method on, it is changed.

    `told`: replies that were changed so that they differ.
    """

    address: str = ""
    change: Change | None = None
    after: int = 0
    told: int = 0
    _seen: int = field(default=0)

    def lie(self, change: Change | None, after: int = 0) -> None:
        self.change, self.after, self.told, self._seen = change, after, 0, 0

    def answer(self, service: str, method: str, reply: bytes) -> bytes:
        if self.change is None or self.change.method != method:
            return reply
        self._seen += 1
        if self._seen <= self.after:
            return reply
        message = reply_type(service, method).FromString(reply)
        self.change.apply(message)
        changed: bytes = message.SerializeToString()
        self.told += changed != reply
        return changed


@contextlib.asynccontextmanager
async def lying(honest: str) -> AsyncIterator[Liar]:
    """A server before the one at `honest`, and what it says."""
    liar, server = Liar(), grpc.aio.server()
    async with grpc.aio.insecure_channel(honest, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:

        class Forward(grpc.GenericRpcHandler):
            def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
                return grpc.stream_stream_rpc_method_handler(_forwarder(channel, details, liar))

        server.add_generic_rpc_handlers((Forward(),))
        liar.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield liar
        finally:
            await server.stop(None)


def _forwarder(channel: grpc.aio.Channel, details: Any, liar: Liar) -> Callable[..., AsyncIterator[bytes]]:
    service, _, method = details.method.removeprefix("/tandem.v1.").partition("/")

    async def forward(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        metadata = [
            pair for pair in details.invocation_metadata if not pair[0].startswith(("grpc-", ":", "user-agent"))
        ]
        call = channel.stream_stream(details.method)(requests, metadata=metadata)
        try:
            async for reply in call:
                yield liar.answer(service, method, reply)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata()))
        finally:
            call.cancel()

    return forward
