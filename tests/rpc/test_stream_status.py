"""The status of a stream that ends while something is written to it, against a real gRPC server in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from tandem.rpc.duplex import ENDED_MEANWHILE, StreamStatus

METHOD = "/test/Stream"


class Refusing(grpc.GenericRpcHandler):
    """Answers the first message of a stream, then ends it with NOT_FOUND."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session", (("reason", "expired"),))


@pytest.fixture
def address() -> Iterator[str]:
    started, ending, found = threading.Event(), threading.Event(), []

    async def serve() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Refusing(),))
        found.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        started.set()
        while not ending.is_set():
            await asyncio.sleep(0.01)
        await server.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    yield f"127.0.0.1:{found[0]}"
    ending.set()
    thread.join()


async def ended_in_a_write(
    channel: grpc.aio.Channel, blocked: float
) -> tuple[StreamStatus, grpc.aio.AioRpcError] | None:
    """Writes to a stream whose end this thread could not notice, because it was blocked for so many seconds.

    Returns None if the end was noticed before, together with the answer.
    """
    call = channel.stream_stream(METHOD)()
    status = StreamStatus(call)
    await call.write(b"first")
    await call.read()
    if call.done():
        return None
    time.sleep(blocked)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.write(b"second")
        await call.read()
        async for _ in call:
            pass
    return status, raised.value


def test_a_write_to_a_stream_that_has_ended_does_not_hide_why(address: str) -> None:
    async def test() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            for blocked in (0.05 * 2 ** (n % 8) for n in range(24)):
                ended = await ended_in_a_write(channel, blocked)
                if ended is None:
                    continue
                status, raised = ended
                overwritten = (raised.code().name, raised.details()) == ENDED_MEANWHILE
                if overwritten and status.error(raised) is not raised:  # else the status itself never arrived
                    break
            else:
                pytest.fail("grpc.aio kept the status of every such stream: is StreamStatus not needed any more?")
            found = status.error(raised)
            assert (found.code(), found.details()) == (grpc.StatusCode.NOT_FOUND, "no such session")
            assert ("reason", "expired") in tuple(found.trailing_metadata())

    asyncio.run(test())
