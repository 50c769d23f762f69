"""Runs llama.cpp's server as a contender, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import Answered
from benchmarks.http_health import until_healthy
from benchmarks.peers import PeerFailed, PeerInfo
from benchmarks.process_groups import ProcessGroups
from tandem.launch import free_port

VARIABLE = "TANDEM_LLAMA_SERVER"
HOST = "127.0.0.1"
START_SECONDS, ANSWER_SECONDS, GRACE_SECONDS = 120.0, 300.0, 5.0
INTERFACE = "over HTTP"


def absence(build: str, program: str) -> str | None:
    """Returns why a build is not available, if so."""
    if not program:
        return f"no {build}: build it (benchmarks/install_llama_cpp.sh) and pass --llama-server or set {VARIABLE}"
    return None if os.access(program, os.X_OK) and Path(program).is_file() else f"no {build}: {program} is no program"


@dataclass(frozen=True, slots=True)
class Served:
    """A server's program and GGUF files."""

    name: str
    program: str
    file_type: str
    model: Path
    draft: Path | None = None
    draft_tokens: int = 0  # always of full length, as vLLM's


def command(served: Served, port: int, threads: int, slots: int, sequence_length: int, known: str) -> list[str]:
    """Returns the command: a build's defaults without its prompt cache, with weights packed for the processor.

    `known`: the build's help; flags that are not in it are left out. Raises PeerFailed for drafts that it cannot take.
    """
    wanted: dict[str, tuple[str, ...]] = {
        "--model": (str(served.model),),
        "--host": (HOST,),
        "--port": (str(port),),
        "--offline": (),
        "--no-ui": (),
        "--threads": (str(threads),),
        "--parallel": (str(slots),),
        "--ctx-size": (str(slots * sequence_length),),
        "--cache-ram": ("0",),
        "--no-cache-prompt": (),
        "--run-time-repack": (),  # ik_llama.cpp's; llama.cpp repacks by itself
    }
    if served.draft:
        if "--spec-draft-model" not in known:
            raise PeerFailed(f"no {served.name}: {served.program} has no --spec-draft-model")
        wanted |= {
            "--spec-draft-model": (str(served.draft),),
            "--spec-type": ("draft-simple",),
            "--spec-draft-p-min": ("0",),
            "--spec-draft-n-max": (str(served.draft_tokens),),
            "--spec-draft-threads": (str(threads),),
        }
    return [served.program, *(word for flag, values in wanted.items() if flag in known for word in (flag, *values))]


def help_of(program: str) -> str:
    """Returns a build's --help. Raises PeerFailed."""
    try:
        done = subprocess.run(
            [program, "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"{program} --help: {error}") from None
    return done.stdout


def asked(prompt: Sequence[int], max_new_tokens: int, stream: bool = True) -> dict[str, Any]:
    """Returns the body of a greedy request. `ignore_eos` forbids ends of sequence; ours generates past them."""
    return {
        "prompt": list(prompt),
        "n_predict": max_new_tokens,
        "samplers": ["top_k"],  # greedy in one pass over the vocabulary; temperature 0 takes two
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": stream,
        "response_fields": ["tokens", "stop", "tokens_predicted", "timings"],
    }


@dataclass(frozen=True, slots=True)
class Completion:
    """A server's answer."""

    answered: Answered
    streamed: bool  # every token came in an event; parts of a character do not
    predicted_ms: float  # the server's own time after the first token
    drafted: int = 0
    accepted: int = 0


def parse(lines: Iterable[tuple[float, bytes]], name: str) -> Completion:
    """Reads a stream's events with their times in seconds. Raises PeerFailed."""
    tokens: list[int] = []
    came: list[float] = []
    for seconds, line in lines:
        field, _, text = line.decode().strip().partition(": ")
        if field not in ("data", "error") or not text.startswith("{"):
            continue
        event = json.loads(text)
        if field == "error" or "error" in event:
            raise PeerFailed(f"{name}: {_message(event.get('error', event))}")
        if event.get("tokens") or event.get("content"):  # some builds give no ids
            tokens += event.get("tokens", ())
            came.append(seconds)
        if event["stop"]:
            return _completion(tokens, came, seconds, event)
    raise PeerFailed(f"{name}: its answer ended after {len(tokens)} tokens")


def _completion(tokens: list[int], came: list[float], seconds: float, last: dict[str, Any]) -> Completion:
    timings = last["timings"]
    first = came[0] if came else seconds
    return Completion(
        Answered(tuple(tokens), seconds, first, 1),
        len(tokens) == last["tokens_predicted"],
        timings["predicted_ms"],
        timings.get("draft_n", 0),
        timings.get("draft_n_accepted", 0),
    )


def _message(error: Any) -> str:
    said = error.get("message", error) if isinstance(error, dict) else error
    return (str(said).strip().splitlines() or [""])[0]


class LlamaServer:
    """A running server with a connection per slot. `said` sums its own statistics."""

    def __init__(self, name: str, port: int, slots: int) -> None:
        self.name, self.port = name, port
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=name)
        self.said: list[Completion] = []

    async def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answered:
        found = await self._in_thread(prompt, max_new_tokens)
        if found.streamed:
            return found.answered
        tokens = await asyncio.get_running_loop().run_in_executor(self._threads, self._tokens, prompt, max_new_tokens)
        return _with_tokens(found.answered, tokens)

    async def answer_all(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Answered]:
        """Answers all at once; unstreamed tokens are -1, at the end."""
        found = await asyncio.gather(*(self._in_thread(prompt, max_new_tokens) for prompt in prompts))
        padding = (-1,) * max_new_tokens
        return [_with_tokens(f.answered, (*f.answered.token_ids, *padding)[:max_new_tokens]) for f in found]

    async def _in_thread(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._ask, prompt, max_new_tokens)
        self.said.append(found)
        return found

    def _ask(self, prompt: Sequence[int], max_new_tokens: int) -> Completion:
        """Times a streamed request on an open connection; parses it after the last event."""
        with self._connected() as connection:
            body = json.dumps(asked(prompt, max_new_tokens))
            sent = time.perf_counter()
            lines = [(time.perf_counter() - sent, line) for line in self._post(connection, body)]
        return parse(lines, self.name)

    def _tokens(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        """Asks again without a stream, which leaves out no token; a build that gives no ids has -1."""
        with self._connected() as connection:
            response = self._post(connection, json.dumps(asked(prompt, max_new_tokens, stream=False)))
            return tuple(json.load(response).get("tokens") or (-1,) * max_new_tokens)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.connect()
            yield connection
        except (OSError, http.client.HTTPException) as error:
            raise PeerFailed(f"{self.name}: {error!r}") from None
        finally:
            connection.close()

    def _post(self, connection: http.client.HTTPConnection, body: str) -> http.client.HTTPResponse:
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            said = json.loads(response.read() or b"{}")
            raise PeerFailed(f"{self.name}: HTTP {response.status}: {_message(said.get('error', said))}")
        return response

    def describe(self) -> str:
        """Returns the server's version."""
        with self._connected() as connection:
            connection.request("GET", "/props")
            return str(json.load(connection.getresponse()).get("build_info", "of unknown version"))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _with_tokens(answered: Answered, tokens: tuple[int, ...]) -> Answered:
    return Answered(tokens, answered.seconds, answered.first_seconds, answered.first_tokens)


@contextlib.asynccontextmanager
async def running(
    groups: ProcessGroups, served: Served, threads: int, slots: int, sequence_length: int, log: Path
) -> AsyncIterator[tuple[LlamaServer, PeerInfo]]:
    """Runs a server during the block. Raises ServerFailed."""
    port = free_port(HOST)
    known = await asyncio.to_thread(help_of, served.program)
    line = command(served, port, threads, slots, sequence_length, known)
    began = time.perf_counter()
    async with groups.running(line, os.environ, log, GRACE_SECONDS) as process:
        await until_healthy(served.name, process, f"http://{HOST}:{port}/health", log, START_SECONDS)
        seconds = time.perf_counter() - began
        server = LlamaServer(served.name, port, slots)
        try:
            version = await asyncio.to_thread(server.describe)
            yield server, PeerInfo(version, threads, served.file_type, seconds, interface=INTERFACE)
        finally:
            server.close()
