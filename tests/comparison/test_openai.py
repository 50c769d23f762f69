"""Servers of the OpenAI API as baselines of a comparison: one of ours, which says its ids of tokens, and another."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tandem import TandemError, compare
from tandem.clients.openai_client import OpenAIClient
from tandem.comparison.api import connector
from tandem.comparison.measuring.architectures import OPENAI
from tandem.comparison.measuring.config import ComparisonConfig, parse_connect
from tandem.comparison.measuring.workloads import given_prompts
from tandem.rpc.credentials import Credentials
from tandem.speculation.types import GenerationRequest
from tests.support import GREEDY, server_process

PROMPT = "the prompt"
EVENTS: list[dict[str, Any] | str] = [
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "bc", "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1},
        },
    },
]


class Stub(http.server.BaseHTTPRequestHandler):
    """Answers `events`, or refuses."""

    events: list[dict[str, Any] | str] = EVENTS
    status = 200

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "a model", "max_model_len": 64}]}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "a model" and asked["stream"]
        lines = [each if isinstance(each, str) else f"data: {json.dumps(each)}" for each in self.events]
        self._answer("\n\n".join([*lines, "data: [DONE]\n\n"]), self.status)

    def _answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *said: Any) -> None:
        """Says nothing."""


@pytest.fixture
def stub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


async def answered(url: str) -> list[Any]:
    request = GenerationRequest(GREEDY, text=PROMPT, max_new_tokens=8)
    return [event async for event in OpenAIClient(url).generate(request, timeout=30)]


def test_an_openai_server_of_ours_is_a_baseline_whose_tokens_are_compared(tmp_path: Path) -> None:
    with server_process(tmp_path, "--role", "target", "--http_port", "0") as server:
        address, ready = server.wait_ready(), json.loads(server.ready_file.read_text())
        url = f"http://{ready['http_host']}:{ready['http_port']}/v1"
        found = compare(
            prompts=(PROMPT,),
            architectures=("autoregressive", "openai"),
            connect={"autoregressive": address, "openai": url},
            backend="toy",
            max_new_tokens=12,
            output_dir=tmp_path / "out",
        )
    ours, theirs = (
        next(r.measurement for r in found.records if r.architecture == name) for name in ("autoregressive", "openai")
    )
    assert ours and theirs
    assert ours.output_token_ids == theirs.output_token_ids and len(theirs.output_token_ids) == 12
    assert theirs.ttft_s > 0 and theirs.tpot_s and theirs.number_input_tokens > 0


async def test_a_server_that_says_no_ids_is_counted_by_its_usage(stub: str) -> None:
    *chunks, end = await answered(stub)
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 1, 3]
    assert "".join(chunk.text for chunk in chunks) == "abc"
    assert (end.prompt_tokens, end.output_tokens, end.finish_reason.name) == (3, 5, "END_OF_SEQUENCE")
    assert (end.stats.accepted, end.stats.drafted) == (2, 3)


@pytest.mark.parametrize(
    ("events", "status", "said"),
    [
        ([{"error": {"message": "out of memory"}}], 200, "out of memory"),
        (["data: {"], 200, "not what OpenAI servers send"),
        (["data: []"], 200, "not what OpenAI servers send"),
        (["no"], 400, "HTTP 400"),
        (["no"], 503, "HTTP 503"),
    ],
)
async def test_what_a_server_refuses_or_breaks_is_said(
    stub: str, monkeypatch: pytest.MonkeyPatch, events: list[Any], status: int, said: str
) -> None:
    monkeypatch.setattr(Stub, "events", events)
    monkeypatch.setattr(Stub, "status", status)
    with pytest.raises(TandemError, match=said):
        await answered(stub)


def test_the_address_is_a_url_and_the_server_must_run(tmp_path: Path) -> None:
    assert parse_connect(["openai=http://a:1/v1", "fused=b:2"]) == {"openai": "http://a:1/v1", "fused": "b:2"}
    for wrong in ("openai=a:1", "openai=ftp://a:1", "openai=http://a:1/v1/models"):
        with pytest.raises(ValueError, match=r"connect: .* is not http://HOST:PORT"):
            parse_connect([wrong])
    with pytest.raises(ValueError, match="--connect openai=URL"):
        compare(prompts=(PROMPT,), architectures=("openai",), output_dir=tmp_path)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://vllm.tandem.svc:8000/v1", None),
        ("http://10.0.0.7:8000", None),
        ("https://openai.tandem.svc/v1", "secret"),
        ("http://127.0.0.1:8000/v1", "secret"),
    ],
)
def test_a_token_is_not_sent_in_clear_to_another_machine(tmp_path: Path, url: str, shown: str | None) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "ca.crt").write_bytes(trustme.CA().cert_pem.bytes())
    config = ComparisonConfig(
        prompts=given_prompts([PROMPT]),
        output_dir=tmp_path,
        architectures=("autoregressive", "openai"),
        connect={"autoregressive": "target.tandem.svc:50051", "openai": url},
        credentials=Credentials(ca=str(tmp_path / "ca.crt"), token_file=str(tmp_path / "token")),
    )
    client = connector(config)(url, OPENAI.service)
    assert isinstance(client, OpenAIClient) and client._token == shown
