"""One id follows a request in metadata, log lines and errors; and no caller's string becomes an entry of the log."""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from tandem.rpc import wire
from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.logs import MAX_BYTES, JsonFormatter, TextFormatter, printable
from tandem.rpc.received_errors import TandemError, from_rpc
from tandem.rpc.request_context import valid_id
from tandem.speculation.types import InvalidField
from tandem.v1 import draft_worker_pb2, fused_speculative_server_pb2, generation_pb2, target_verifier_pb2
from tandem.v1 import target_verifier_pb2 as pb
from tests.daily import daily
from tests.services.test_transport import generating
from tests.support import GREEDY, answer, ids, oracle, raw_stub, run, run_here, server_process

SECRET = b"sesame"


def lines(log: Path, **wanted: Any) -> list[dict[str, Any]]:
    """JSON lines that have these members; every line is one."""
    said = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in said if wanted.items() <= line.items()]


def test_one_id_is_in_the_lines_of_client_draft_worker_and_target(tmp_path: Path) -> None:
    async def ask(address: str) -> Any:
        async with GenerationClient.connect(address, DRAFT) as client:
            request = ids(SECRET, 20, ignore_end_of_sequence=True)
            return await answer(lambda r: client.generate(r, request_id="quote-me/7"), request)

    with server_process(tmp_path, "--role", "target", "--log_format", "json") as target:
        port = target.wait_ready().split(":")[1]
        arguments = ("--role", "draft_worker", "--target_port", port, "--log_format", "json")
        with server_process(tmp_path, *arguments, ready_file="worker.json") as worker:
            got = run(ask(worker.wait_ready()))
    stats = got.completion.stats
    counts = {"rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted}
    (there,) = lines(worker.log, request_id="quote-me/7")
    assert there["level"] == "INFO" and there["logger"] == "tandem.request" and there["role"] == "draft_worker"
    assert counts.items() <= there.items()
    assert (there["status"], there["finish_reason"]) == ("OK", "length")
    assert (there["prompt_tokens"], there["output_tokens"]) == (6, 20)
    (beyond,) = lines(target.log, request_id="quote-me/7")
    assert (beyond["role"], beyond["method"], beyond["status"]) == ("target", "session", "closed")
    assert counts.items() <= beyond.items()
    assert (beyond["prompt_tokens"], beyond["output_tokens"]) == (6, 20)
    tokens = oracle(SECRET, GREEDY, 20, past_the_end=True)
    for log in (worker.log, target.log):
        text = log.read_text()
        assert SECRET.decode() not in text and ", ".join(map(str, tokens[:3])) not in text


def test_an_id_is_made_where_the_client_sends_none_and_told_in_the_trailing_metadata(tmp_path: Path) -> None:
    async def ask(address: str) -> list[str]:
        told = []
        async with raw_stub(address) as stub:
            for metadata in (None, (("x-request-id", "has space"),), (("x-request-id", "x" * 129),)):
                call = stub.Generate(generating(8), metadata=metadata)
                async for _ in call:
                    pass
                told.append(dict(await call.trailing_metadata())["x-request-id"])
            own = stub.Generate(generating(8), metadata=(("x-request-id", "mine"),))
            async for _ in own:
                pass
            assert "x-request-id" not in dict(await own.trailing_metadata())
        return told

    with server_process(tmp_path, "--role", "target", "--log_format", "json") as server:
        told = run(ask(server.wait_ready()))
    assert len(set(told)) == 3 and all(valid_id(each) for each in told)
    for each in [*told, "mine"]:
        assert len(lines(server.log, request_id=each, method="TargetVerifier/Generate", status="OK")) == 1


def test_an_error_says_the_id_and_so_does_its_log_line_but_not_what_was_asked(tmp_path: Path) -> None:
    async def ask(address: str) -> tuple[TandemError, TandemError]:
        async with GenerationClient.connect(address, TARGET) as client:
            with pytest.raises(TandemError) as generating:
                await answer(client.generate, ids([4242]))
        async with raw_stub(address) as stub:
            with pytest.raises(grpc.RpcError) as verifying:
                await stub.Verify(pb.VerifyRequest(session_id="s", base_length=1))
            return generating.value, from_rpc(verifying.value)

    with server_process(tmp_path, "--role", "target", "--log_format", "json") as server:
        generating, verifying = run(ask(server.wait_ready()))
        assert server.stop() == 0  # a refusal is on its way before its line is written
    assert "4242" in str(generating) and "4242" not in server.log.read_text()
    assert generating.request_id and verifying.request_id
    (line,) = lines(server.log, request_id=generating.request_id)
    assert (line["status"], line["reason"], line["level"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", "INFO")
    (line,) = lines(server.log, request_id=verifying.request_id)
    assert (line["status"], line["reason"], line["level"]) == ("NOT_FOUND", "SESSION_NOT_FOUND", "INFO")


async def test_an_id_that_cannot_be_sent_is_refused_before_anything_is() -> None:
    async with GenerationClient.connect("127.0.0.1:1", TARGET) as client:
        with pytest.raises(InvalidField, match="request_id: 'a b' is not 1 to 128 visible ASCII characters"):
            await answer(lambda r: client.generate(r, request_id="a b"), ids(b"abc"))


@pytest.fixture
def written() -> Iterator[tuple[logging.Logger, io.StringIO, logging.StreamHandler[Any]]]:
    stream, logger = io.StringIO(), logging.getLogger("tandem.test_request_ids")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger, stream, handler
    logger.removeHandler(handler)


def test_lines_as_text_and_as_json(written: tuple[logging.Logger, io.StringIO, logging.StreamHandler[Any]]) -> None:
    logger, stream, handler = written
    handler.setFormatter(TextFormatter())
    logger.warning("no request")
    logger.warning("a request", extra={"request_id": "r1"})
    assert [line.partition(": ")[2] for line in stream.getvalue().splitlines()] == ["no request", "a request [r1]"]
    stream.truncate(0), stream.seek(0)
    handler.setFormatter(JsonFormatter())
    try:
        raise RuntimeError("broken\nin two lines")
    except RuntimeError:
        logger.exception("it %s", "failed", extra={"request_id": "r2", "fields": {"rounds": 3}})
    (line,) = stream.getvalue().splitlines()
    said = json.loads(line)
    assert (said["level"], said["message"], said["request_id"], said["rounds"]) == ("ERROR", "it failed", "r2", 3)
    assert "broken\nin two lines" in said["exception"] and said["time"].endswith("Z")


def test_an_unknown_log_format_is_refused(tmp_path: Path) -> None:
    asked = run_here(tmp_path, "--role", "target", "--backend", "toy", "--log_format", "xml")
    assert (asked.returncode, asked.stderr) == (2, "main.py: log_format: 'xml' is not one of text, json\n")


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
