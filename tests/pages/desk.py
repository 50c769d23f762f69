"""Where the commands of a page run: a folder like a checkout after `make setup`, and the servers started in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.pages.blocks import ROOT
from tests.recipes import models

SECONDS = 600.0
ARGUMENTS_OF_MAKE = frozenset({"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS"})
"""`make thorough ARGS=...` hands its arguments to every make beneath it; a reader's shell has none of them."""
CHAT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
TANDEM = "#!/bin/sh\nexec python -c 'import sys; from tandem.cli.main import console; sys.exit(console())' \"$@\"\n"
"""The command that an installation adds; the wheel's own is run by tests/packaging/."""


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    line: str
    ports: tuple[int, ...]
    log: Path


@dataclass
class Desk:
    """`folder` links to the files of the checkout, and holds what the commands write."""

    folder: Path
    servers: list[Server] = field(default_factory=list)

    def __enter__(self) -> Desk:
        for path in ROOT.iterdir():
            if path.name not in (".git", ".venv", "results", "__pycache__"):
                (self.folder / path.name).symlink_to(path)
        venv = self.folder / ".venv"
        venv.mkdir()
        for path in Path(sys.prefix).iterdir():
            (venv / path.name).symlink_to(path)
        (venv / ".set-up").unlink(missing_ok=True)
        (venv / ".set-up").touch()  # later than every pin: nothing is due
        (self.folder / "installed").mkdir()
        command = self.folder / "installed" / "tandem"
        command.write_text(TANDEM)
        command.chmod(0o755)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(*self.servers)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder / ".venv/bin"), str(self.folder / "installed"), os.environ["PATH"]])
        own = {name: value for name, value in os.environ.items() if name not in ARGUMENTS_OF_MAKE}
        return {**own, "PATH": path, "PYTHONPATH": str(self.folder), "HF_HUB_OFFLINE": "1"}

    def with_files(self, line: str, placeholders: Sequence[str] | dict[str, str]) -> str:
        """The line with files of this machine, in the order of the placeholders: draft, target, comparison."""
        draft, target, comparison = placeholders
        for pattern, file in ((draft, "Llama-1B"), (target, "Llama-8B")):
            if re.search(pattern, line):
                (self.folder / "models").mkdir(exist_ok=True)
                folder = models.write(self.folder / "models" / file)
                (folder / "chat_template.jinja").write_text(CHAT)
                line = re.sub(pattern, str(folder), line)
        if re.search(comparison, line):
            line = re.sub(comparison, str(sorted(self.folder.glob("results/*/comparison.json"))[-1]), line)
        return line

    def run(self, words: Sequence[str], text: str = "") -> str:
        """Runs a command to its end. Raises AssertionError with what it and the servers said if it fails."""
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said, errors = process.communicate(text, SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with what the shell started
            said, errors = process.communicate()
            raise AssertionError(f"took more than {SECONDS:.0f} s: {said[-2000:]}{errors[-3000:]}") from None
        ended = [
            f"{server.line} ended:\n{_tail(server.log)}" for server in self.servers if server.process.poll() is not None
        ]
        assert process.returncode == 0 and not ended, "\n".join([said[-2000:], errors[-3000:], *ended])
        return said

    def serve(self, line: str, grpc_port: int, http_port: int) -> None:
        """Starts a server, in place of those on its ports, and waits until it is ready."""
        ports = tuple(port for port in (grpc_port, http_port) if port)
        self.end(*(server for server in self.servers if set(server.ports) & set(ports)))
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", line],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.servers.append(Server(process, line, ports, log))
        give_up = time.monotonic() + SECONDS
        while not (_serves(grpc_port) and _answers(http_port)):
            assert process.poll() is None and time.monotonic() < give_up, _tail(log)
            time.sleep(0.1)

    def end(self, *servers: Server) -> None:
        """Ends servers as Ctrl-C does; kills those that have not ended 30 s later."""
        for server in reversed(servers):
            self.servers.remove(server)
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGINT)
            try:
                server.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()
                raise AssertionError(f"{server.line} did not end by Ctrl-C:\n{_tail(server.log)}") from None


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]


def _serves(port: int) -> bool:
    if not port:
        return True
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            said = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return bool(said.status == health_pb2.HealthCheckResponse.SERVING)


def _answers(port: int) -> bool:
    if not port:
        return True
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
