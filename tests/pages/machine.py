"""A machine for one page: a folder, an environment, and the servers started there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 600.0


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    words: Sequence[str]
    ports: tuple[int, ...]
    log: Path

    @property
    def end_of_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]


@dataclass
class Machine:
    folder: Path
    environment: Mapping[str, str]
    servers: list[Server] = field(default_factory=list)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(*self.servers)

    def run(self, words: Sequence[str], text: str = "") -> str:
        """Runs a command to its end. Raises AssertionError with the outputs if it fails, or if a server has ended."""
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
            output, errors = process.communicate(text, SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its own children
            output, errors = process.communicate()
            raise AssertionError(f"took more than {SECONDS:.0f} s: {output[-2000:]}{errors[-3000:]}") from None
        ended = [f"{each.words} ended:\n{each.end_of_log}" for each in self.servers if each.process.poll() is not None]
        assert process.returncode == 0 and not ended, "\n".join([output[-2000:], errors[-3000:], *ended])
        return output

    def serve(self, words: Sequence[str], grpc_port: int, http_port: int = 0) -> None:
        """Starts a server, in place of those on its ports, and waits until it is ready."""
        ports = tuple(port for port in (grpc_port, http_port) if port)
        self.end(*(server for server in self.servers if set(server.ports) & set(ports)))
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        server = Server(process, words, ports, log)
        self.servers.append(server)
        give_up = time.monotonic() + SECONDS
        while not (serves(grpc_port) and _answers(http_port)):
            assert process.poll() is None and time.monotonic() < give_up, server.end_of_log
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
                raise AssertionError(f"{server.words} did not end by Ctrl-C:\n{server.end_of_log}") from None


def serves(port: int, service: str = "") -> bool:
    if not port:
        return True
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _answers(port: int) -> bool:
    if not port:
        return True
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
