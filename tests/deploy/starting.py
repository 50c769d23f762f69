"""Starts containers of the manifests as processes here: on the toy runner, under other paths, ports and names.

What is taken away from a command is what needs a device or a model; everything else is as a kubelet would run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.ports import free_port
from tandem.rpc.credentials import Credentials
from tandem.rpc.generation_client import GenerationClient
from tests.deploy.manifests import OVERLAYS, filled, of_kind, pods, values_of
from tests.support import REPOSITORY, ids

DEVICE = (
    "model",
    "target_model",
    "draft_model",
    "device",
    "backend",
    "dtype",
    "compiled_dir",
    "artifacts",
    "tp_degree",
)
DEVICE += ("weights", "cores", "neuron_config", "draft_neuron_config", "pair")
SERVICES = {
    "target": "TargetVerifier",
    "draft_worker": "DraftWorker",
    "fused_target": "FusedSpeculativeServer",
}
PORTS = ("port", "health_port", "metrics_port", "http_port")
START_SECONDS = 120


@dataclass(frozen=True)
class Container:
    """A container as a kubelet fills its words: `command` before the program's name, `arguments` after it."""

    overlay: str
    workload: str
    image: str
    command: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def flags(self) -> dict[str, str]:
        return dict(word.removeprefix("--").partition("=")[::2] for word in self.arguments)


def containers(overlay: str, kind: str) -> list[Container]:
    """All containers of the workloads of a kind that run a program of ours, init containers too."""
    folder, found = f"overlays/{overlay}", []
    values = values_of(folder)
    for name in of_kind(folder, kind):
        spec = pods(folder)[name]["spec"]
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            image = each["image"].partition(":")[2].partition("-")[0]
            command, arguments = (tuple(filled(w, values) for w in each.get(part, ())) for part in ("command", "args"))
            if command[-1].endswith(".py"):
                found.append(Container(overlay, name, image, command, arguments))
    return found


def servers() -> list[Container]:
    """Every server command of every overlay, once, where it stands first."""
    found: dict[tuple[str, ...], Container] = {}
    for overlay in OVERLAYS:
        for each in containers(overlay, "StatefulSet"):
            found.setdefault(each.arguments, each)
    return list(found.values())


def free_ports(container: Container) -> dict[str, int]:
    return {name: free_port() for name in PORTS if name in container.flags}


def make_secrets(folder: Path) -> Path:
    """The files of the two secrets of the namespace, made as deploy/README.md says."""
    subprocess.run(["sh", str(REPOSITORY / "deploy" / "secrets.sh"), str(folder)], check=True, timeout=60)
    return folder


def here(arguments: Sequence[str], secrets: Path, ports: dict[str, int], **replaced: str) -> list[str]:
    """The arguments with this machine's ports and secrets; `replaced` are values of further flags."""
    words = []
    for word in arguments:
        name, _, value = word.removeprefix("--").partition("=")
        value = str(ports[name]) if name in ports else replaced.get(name.replace("-", "_"), value)
        if value.startswith(("/tls/", "/tokens/")):
            value = f"{secrets}{value}"
        words.append(f"--{name}={value}" if value else f"--{name}")
    return words


def on_toy(container: Container, secrets: Path, ports: dict[str, int], target: int | None = None) -> list[str]:
    """A server's arguments, with the toy runner in place of models and a device. `target`: port of whom it calls."""
    kept = [word for word in container.arguments if word.removeprefix("--").partition("=")[0] not in DEVICE]
    words = here(kept, secrets, ports, target_host=f"127.0.0.1:{target}")
    drafting = container.flags["role"] != "target" and "draft" not in container.flags
    drafts = ["--draft=model", "--draft_model=miss=0.3"] if drafting else []
    return [*words, "--backend=toy", *drafts]


@contextlib.contextmanager
def started(words: Sequence[str], folder: Path, cwd: Path, environment: dict[str, str] | None = None) -> Iterator[Path]:
    """Runs a server until the block ends; yields its log once it is ready. It must end by itself after SIGTERM."""
    folder.mkdir()
    ready, log = folder / "ready", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, f"--ready_file={ready}"],
            cwd=cwd,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        give_up = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        yield log
        process.terminate()
        code, said = process.wait(60), log.read_text()
        signalled = Path(words[0]).name == "torchrun" and '"message": "stopped"' in said
        assert code == (1 if signalled else 0), said  # torchrun's own code for a signal that its process obeyed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tokens_of(port: int, service: str, secrets: Path | None, count: int = 12) -> tuple[int, ...]:
    """The tokens of a request with TLS and a token; without `secrets`, in clear text."""
    files = {"ca": f"{secrets}/tls/ca.crt", "token_file": f"{secrets}/tokens/comparison"} if secrets else {}
    credentials = Credentials(**files)

    async def ask() -> tuple[int, ...]:
        async with GenerationClient.connect(f"127.0.0.1:{port}", service, credentials) as client:
            tokens: tuple[int, ...] = ()
            async for event in client.generate(ids(b"abab", count, ignore_end_of_sequence=True), timeout=30):
                tokens += getattr(event, "token_ids", ())
            return tokens

    return asyncio.run(ask())


def health(port: int, service: str) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status
