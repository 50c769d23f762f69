"""The life of a server with an HTTP port, as a process: its lines, its signals, and what clients see of its end."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.support import HANG, ServerProcess, launch, server_process

pytestmark = pytest.mark.thorough
DOOR = ("--role", "fused_target", "--http_port", "0", "--sequence_length", "2048")
SLOW = (*DOOR, "--model", "step=0.02", "--draft", "ngram")


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[ServerProcess]:
    with server_process(tmp_path, *SLOW) as server:
        yield server


@contextlib.contextmanager
def asking(server: ServerProcess, tokens: int = 1500) -> Iterator[tuple[openai.OpenAI, Any, Future[Any]]]:
    """A client, its stream, of which an event was read, and a request without one that is under way beside it."""
    body: Any = {"model": "toy", "prompt": "hello", "max_tokens": tokens, "extra_body": {"ignore_eos": True}}
    url = f"http://127.0.0.1:{json.loads(server.ready_file.read_text())['http_port']}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=HANG) as client,
        ThreadPoolExecutor() as pool,
    ):
        plain = pool.submit(client.completions.create, **body)
        with client.completions.create(**body, stream=True) as stream:
            next(stream)
            time.sleep(0.2)
            yield client, stream, plain


def no_answer(client: openai.OpenAI, **body: Any) -> openai.APIError:
    with pytest.raises(openai.APIError) as error:
        client.completions.create(model="toy", prompt="a", max_tokens=1, **body)
    return error.value


def gone(client: openai.OpenAI) -> None:
    """Checks that nobody listens any more."""
    assert isinstance(no_answer(client).__cause__, httpx2.ConnectError)


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGKILL,)]
)
def test_an_end_at_once_breaks_connections_and_no_client_takes_the_rest_for_a_whole(
    numbers: tuple[signal.Signals, ...], slow: ServerProcess
) -> None:
    with asking(slow) as (client, stream, plain):
        for number in numbers:
            began = time.monotonic()
            slow.process.send_signal(number)
            time.sleep(0.3)
        assert slow.process.wait(HANG) != 0 and time.monotonic() - began < 2.0
        with pytest.raises(openai.APIConnectionError):
            list(stream)
        assert isinstance(plain.exception(), openai.APIConnectionError)
        gone(client)


def test_a_port_that_is_taken_is_told_before_models_load(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = launch(tmp_path, "--role", "target", "--backend", "toy", "--port", "0", "--http_port", port)
    assert result.returncode == 2 and f"http_port: cannot listen on 127.0.0.1:{port}" in result.stderr
