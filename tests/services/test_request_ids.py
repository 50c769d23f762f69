"""One id follows a request from client to verifier, in metadata, in log lines and in errors."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.rpc.channel import DRAFT, TARGET
from tandem.rpc.generation_client import GenerationClient
from tandem.rpc.logs import JsonFormatter, TextFormatter
from tandem.rpc.received_errors import TandemError, from_rpc
from tandem.rpc.request_context import valid_id
from tandem.speculation.types import InvalidField
from tandem.v1 import target_verifier_pb2 as pb
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
