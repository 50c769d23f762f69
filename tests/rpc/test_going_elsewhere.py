"""What a client does about two verifiers, scripted call by call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest

from tandem.rpc.errors import TandemError
from tandem.rpc.verifier_client import Deadlines, VerifierClient
from tandem.services.errors import SessionExpired
from tandem.speculation.retry import Persistence
from tandem.speculation.types import Request
from tandem.v1 import generation_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tandem.v1.target_verifier_pb2_grpc import TargetVerifierServicer, add_TargetVerifierServicer_to_server
from tests.support import GREEDY, RemoteRounds, RoundByRound, listening, remote_verifier, run

PROMPT = [1, 2, 3]


class Scripted(RoundByRound, TargetVerifierServicer):
    """Says what `info` is, and to each Verify what is next in `rounds`; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.info: dict[str, Any] = {"model_name": "m", "weights_revision": "r", "tokenizer_sha256": "toy"}
        self.info |= {"backend": "toy", "vocab_size": 258, "max_sequence_length": 100}
        self.rounds: list[grpc.StatusCode] = []

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        self.calls.append("GetModelInfo")
        return pb.TargetVerifierGetModelInfoResponse(model=generation_pb2.ModelInfo(**self.info))

    async def OpenSession(self, request: Any, context: Any) -> Any:
        self.calls.append("OpenSession")
        return pb.OpenSessionResponse(committed_length=len(request.prefix))

    async def CloseSession(self, request: Any, context: Any) -> Any:
        return pb.CloseSessionResponse(closed=True)

    async def Verify(self, request: Any, context: Any) -> Any:
        self.calls.append("Verify")
        if self.rounds:
            await context.abort(self.rounds.pop(0), SessionExpired.__name__)
        return pb.VerifyResponse(committed_length=request.base_length + 1, token_ids=[7])


async def two(
    test: Callable[[Scripted, Scripted, VerifierClient, RemoteRounds], Coroutine[Any, Any, None]],
) -> None:
    """Runs a test of a session that is open at the first of two verifiers."""
    async with contextlib.AsyncExitStack() as stack:
        servers, addresses = [Scripted(), Scripted()], []
        for server in servers:
            register = lambda to, server=server: add_TargetVerifierServicer_to_server(server, to)  # noqa: E731
            addresses.append(await stack.enter_async_context(listening(register)))
        client = VerifierClient(",".join(addresses), "toy", Deadlines(stall=60.0), Persistence(5.0))
        stack.push_async_callback(client.close)
        await client.model_info()
        client.pool.current = addresses[0]
        for endpoint in client.endpoints.values():
            endpoint.suspect = False
        session = remote_verifier(client, Request(GREEDY))
        await session.open(PROMPT)
        for server in servers:
            server.calls.clear()
        await test(*servers, client, session)
        await session.close()


def test_a_lease_that_ran_out_is_no_failure_of_its_verifier(caplog: pytest.LogCaptureFixture) -> None:
    """G5: the session is opened again where it was, and new requests go there too."""
    run(two(_lease_ran_out))
    assert " failed (" not in caplog.text


async def _lease_ran_out(first: Scripted, second: Scripted, client: VerifierClient, session: RemoteRounds) -> None:
    first.rounds = [grpc.StatusCode.NOT_FOUND]
    verdict = await session.verify(PROMPT, [])
    assert verdict.token_ids == (7,)
    assert client.address == client.pool.addresses[0], "its verifier counts as failed"
    assert first.calls == ["Verify", "GetModelInfo", "OpenSession", "Verify"] and not second.calls


def test_a_verifier_that_failed_says_again_what_it_runs_before_it_is_trusted() -> None:
    """G8: what answers at its address may be another server, with another device, which an opening would not tell."""
    run(two(_comes_back_as_another))


async def _comes_back_as_another(
    first: Scripted, second: Scripted, client: VerifierClient, session: RemoteRounds
) -> None:
    first.rounds = [grpc.StatusCode.UNAVAILABLE]
    await session.verify(PROMPT, [])
    assert second.calls == ["OpenSession", "Verify"]
    first.info["backend"] = "other"
    second.rounds, second.info["backend"] = [grpc.StatusCode.UNAVAILABLE], "other"
    with pytest.raises(TandemError, match="its backend is 'other', but this client started with 'toy'") as caught:
        await session.verify([*PROMPT, 7], [])
    assert caught.value.code == "FAILED_PRECONDITION"
    assert first.calls == ["Verify", "GetModelInfo"], "a session was opened at another model"
