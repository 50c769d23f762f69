"""The real gateway as a process, in front of servers, and what a client sees of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import HANG, MAIN, REPOSITORY, server_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is absent: apt install curl")


@dataclass
class Gateway:
    process: subprocess.Popen[str]
    port: int
    model: str
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def post(self, path: str = CHAT, key: str = "", **body: Any) -> Reply:
        return self.send(path, {"model": self.model, **({"messages": HELLO} if path == CHAT else {}), **body}, key)

    def send(self, path: str, body: Any, key: str = "") -> Reply:
        """One request, read to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG)
        headers = {"content-type": "application/json", **({"x-smg-routing-key": key} if key else {})}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read().decode())
        connection.close()
        return reply

    def begin(self, path: str = CHAT, **body: Any) -> Stream:
        """A streamed request whose first event was read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG)
        whole = {"model": self.model, "stream": True, "messages": HELLO, "ignore_eos": True, **body}
        connection.request("POST", path, json.dumps(whole), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and response.readline().startswith(b"data: ")
        return Stream(connection, response)


@dataclass
class Stream:
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse

    def rest(self) -> str:
        text = self.response.read().decode()
        self.leave()
        return text

    def leave(self) -> None:
        """What a client does that goes away: both ends of its connection are closed."""
        self.response.close()
        self.connection.close()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        (choice,) = self.json["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    with (folder / "gateway.log").open("w") as log:
        ready = ("--ready_file", str(folder / "gateway.json"))
        return subprocess.Popen(
            [sys.executable, MAIN, "--role", "gateway", "--http_port", "0", *arguments, *ready],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )


@contextlib.contextmanager
def worker(folder: Path, *flags: str) -> Iterator[tuple[str, str]]:
    """The gateway's flags for a server of its own."""
    with server_process(folder, "--role", "fused_target", "--engine_port", "0", *flags, ready_file="worker.json") as it:
        yield "--workers", f"127.0.0.1:{json.loads(it.ready_file.read_text())['engine_port']}"


def wait_ready(process: subprocess.Popen[str], folder: Path) -> Gateway:
    ready, log, give_up = folder / "gateway.json", folder / "gateway.log", time.monotonic() + 2 * HANG
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < give_up, log.read_text()
        time.sleep(0.02)
    said = json.loads(ready.read_text())
    return Gateway(process, said.get("http_port", said["port"]), said["model"], log)


@contextlib.contextmanager
def gateway(folder: Path, *arguments: str) -> Iterator[Gateway]:
    """A gateway, told to end as the block ends. Whatever it started must have ended with it."""
    process = start(folder, *arguments)
    try:
        yield wait_ready(process, folder)
    finally:
        parts = children(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=HANG)
        finally:
            for pid in parts:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert [pid for pid in parts if running(pid)] == []


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if status.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(status.parent.name))
    return found


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
