"""Strings from callers, in every field of every request: log entries stay ours, refusals keep their status."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.logs import MAX_BYTES, printable
from tandem.rpc.received_errors import from_rpc
from tandem.v1 import draft_worker_pb2, fused_speculative_server_pb2, generation_pb2, target_verifier_pb2
from tests.daily import daily
from tests.support import GREEDY, raw_stub, run, server_process

FORGED = "x\n2026-11-22 00:00:00,000 INFO tandem.security: access: granted\x1b[2J\x9b1m\u2028\u202e\r"
NASTY = {"forged": FORGED, "8 kB": "y" * 8192, "wide": "\U0001f600" * 4000, "3 MB": "z" * 3_000_000}
ENTRY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [a-zA-Z_.]+: ")
GENERATION = generation_pb2.Generation(token_ids=generation_pb2.TokenIds(ids=[65, 66]), max_new_tokens=2)
SAMPLING = wire.sampling_to_wire(GREEDY)
# A request of each method that has strings, right but for the string that is put into it.
REQUESTS: dict[tuple[str, str], Any] = {
    (TARGET, "Generate"): target_verifier_pb2.TargetVerifierGenerateRequest(generation=GENERATION),
    (FUSED, "Generate"): fused_speculative_server_pb2.FusedSpeculativeServerGenerateRequest(generation=GENERATION),
    (DRAFT, "Generate"): draft_worker_pb2.DraftWorkerGenerateRequest(generation=GENERATION),
    (TARGET, "OpenSession"): target_verifier_pb2.OpenSessionRequest(
        session_id="s", prefix=[65], prompt_length=1, sampling=SAMPLING
    ),
    (TARGET, "Verify"): target_verifier_pb2.VerifyRequest(session_id="s", base_length=1, last_token=65),
    (TARGET, "VerifyStream"): target_verifier_pb2.VerifyRequest(session_id="s", base_length=1, last_token=65),
    (TARGET, "CloseSession"): target_verifier_pb2.CloseSessionRequest(session_id="s"),
    (DRAFT, "Propose"): draft_worker_pb2.ProposeRequest(tokens=[65], speculation_length=1, sampling=SAMPLING),
}
TOO_LARGE = re.compile(r"SERVER: Received message larger than max \(\d+ vs\. \d+\)")  # before it is read
DECLARED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF_RANGE"}


def strings_of(descriptor: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every string field within a message."""
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield (*path, field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from strings_of(field.message_type, (*path, field.name))


def having(request: Any, path: tuple[str, ...], text: str) -> Any:
    changed = type(request)()
    changed.CopyFrom(request)
    *parents, name = path
    inner = changed
    for parent in parents:
        inner = getattr(inner, parent)
        inner = inner.add() if hasattr(inner, "add") else inner  # of a repeated field
    if isinstance(getattr(inner, name), str):
        setattr(inner, name, text)
    else:
        getattr(inner, name).append(text)
    return changed


async def status_of(stub: Any, method: str, request: Any) -> str:
    call = getattr(stub, method)
    try:
        if method in ("VerifyStream", "Propose"):
            [reply async for reply in call(iter([request]))]
        elif method == "Generate":
            [reply async for reply in call(request)]
        else:
            await call(request)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return "TOO_LARGE" if TOO_LARGE.fullmatch(error.details()) else f"RESOURCE_EXHAUSTED: {error.details()}"
        assert error.details().isprintable() and from_rpc(error).reason, error
        return error.code().name
    return "OK"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A process of each service, which says all that it can."""
    folder = tmp_path_factory.mktemp("fleet")
    with (
        server_process(folder, "--role", "target", "--debug", ready_file="target.json") as target,
        server_process(folder, "--role", "fused_target", "--debug", ready_file="fused.json") as fused,
    ):
        address = target.wait_ready()
        worker_flags = ("--role", "draft_worker", "--debug", "--target_host", address)
        with server_process(folder, *worker_flags, ready_file="worker.json") as worker:
            fused.wait_ready(), worker.wait_ready()
            yield {TARGET: target, FUSED: fused, DRAFT: worker}


# Of the three Generate, whose strings are the same, make test asks one.
@pytest.mark.parametrize(("service", "method"), daily(REQUESTS, 0, *range(3, len(REQUESTS))), ids=str)
def test_no_string_of_a_caller_becomes_an_entry_of_the_log(fleet: dict[str, Any], service: str, method: str) -> None:
    server, request = fleet[service], REQUESTS[service, method]
    before = {name: len(each.log.read_bytes()) for name, each in fleet.items()}
    asked = [(having(request, path, NASTY[n]), n) for path in strings_of(request.DESCRIPTOR) for n in NASTY]

    async def ask() -> set[tuple[str, str]]:
        async with raw_stub(server.wait_ready(), service) as stub:
            return {(await status_of(stub, method, each), name) for each, name in asked}

    assert run(ask()) <= {*itertools.product(DECLARED, NASTY), ("TOO_LARGE", "3 MB")}
    for name, each in fleet.items():
        said = each.log.read_bytes()[before[name] :].decode()
        entries = said.split("\n")
        assert entries.pop() == "", "the last line is whole"
        assert all(ENTRY.match(line) and line.isprintable() for line in entries), said[:2000]
        assert not any(line.startswith("2026-11-22 00:00:00,000 INFO tandem.security") for line in entries)
        assert len(said) <= 2048 * len(asked)


def test_a_short_line_stays_as_it_is_and_another_is_escaped_and_cut() -> None:
    assert printable("plain: text, ünd 日本") == "plain: text, ünd 日本"
    assert printable(FORGED).isprintable() and printable(FORGED).startswith("x\\n2026")
    for text in NASTY.values():
        short = printable(text)
        assert short.isprintable() and len(short.encode()) <= MAX_BYTES
    assert printable("a" * (MAX_BYTES + 1)).endswith(" ...")
    assert printable("a" * 10_000, None) == "a" * 10_000
    assert printable("\ud800") == "\\ud800"
