"""A server whose target is shared by two processes: the tokens of one process.

They are started by main.py, by torchrun, or by a torchrun for each of two hosts. Here both hosts are this machine,
under one address: deploy/README.md says what ran between two addresses.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.generators import plain_generator
from tandem.engine.load_models import load
from tandem.engine.model_config import ModelConfig
from tandem.launch import free_port
from tandem.rpc.generation_client import GenerationClient
from tandem.runners.load_runner import Execution, Shape
from tandem.speculation.types import GenerationRequest, SamplingParams
from tests.runners.tiny import model_folder
from tests.support import REPOSITORY, answer, run

FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--compile", "off", "--sequence_length", "96")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
REQUESTS = [
    GenerationRequest(text="shared", max_new_tokens=20, ignore_end_of_sequence=True),
    GenerationRequest(text="by two", max_new_tokens=20, sampling=SAMPLED, ignore_end_of_sequence=True),
]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def launchers(hosts: int) -> list[list[str]]:
    """What starts main.py twice: nothing at 0 hosts (it does so itself), else a torchrun on each."""
    if hosts < 2:
        return [[*TORCHRUN, "--standalone", "--nproc-per-node", "2"] if hosts else [sys.executable]]
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [[*TORCHRUN, *place, "--node-rank", str(host)] for host in range(hosts)]


class SharedServer:
    """main.py, alone or under torchrun."""

    def __init__(self, folder: Path, hosts: int, *arguments: str) -> None:
        self.ready, self.log = folder / "ready.json", folder / "server.log"
        own = [str(REPOSITORY / "main.py"), "--tp_degree", "2", "--port", "0", "--ready_file", str(self.ready)]
        with self.log.open("w") as log:
            self.processes = [
                subprocess.Popen([*launcher, *own, *FLAGS, *arguments], cwd=folder, stdout=log, stderr=log)
                for launcher in launchers(hosts)
            ]

    def wait_ready(self, seconds: float = 100.0) -> str:
        give_up = time.monotonic() + seconds
        while not self.ready.exists():
            running = all(process.poll() is None for process in self.processes)
            assert running and time.monotonic() < give_up, self.log.read_text()
            time.sleep(0.05)
        self.facts = json.loads(self.ready.read_text())
        return f"{self.facts['host']}:{self.facts['port']}"


async def alone(folder: Path) -> list[tuple[int, ...]]:
    """What one process says."""
    batcher = Batcher("alone")
    config = ModelConfig(Execution("cpu", "float32", 1, "off"), Shape(2, 96, 3), str(folder))
    generator = plain_generator(await load(config, batcher))
    try:
        return [(await answer(generator.generate, request)).token_ids for request in REQUESTS]
    finally:
        await batcher.close()


async def asked(address: str, service: str) -> list[tuple[int, ...]]:
    async with GenerationClient.connect(address, service) as client:
        return [(await answer(client.generate, request)).token_ids for request in REQUESTS]


@pytest.mark.thorough
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("role", "hosts"), [("target", 0), ("fused_target", 1), ("target", 2)])
def test_a_shared_target_answers_as_one_process_does_and_stops_when_it_is_told(
    tmp_path: Path, role: str, hosts: int
) -> None:
    target, draft = model_folder(tmp_path / "target", 1), model_folder(tmp_path / "draft", 2)
    models = ("--target_model", str(target), *(("--draft_model", str(draft)) if role == "fused_target" else ()))
    server = SharedServer(tmp_path, hosts, "--role", role, *models, "--batch", "2", "--max_speculation_length", "3")
    try:
        address = server.wait_ready()
        service = "TargetVerifier" if role == "target" else "FusedSpeculativeServer"
        assert run(asked(address, service)) == run(alone(target))
        os.kill(server.facts["pid"], signal.SIGTERM)
        assert [process.wait(30) for process in server.processes] == [0] * max(1, hosts), server.log.read_text()
        assert "[rank 1] rank 1 follows" in server.log.read_text() and "stopped" in server.log.read_text()
    finally:
        for process in server.processes:
            process.kill()
            process.wait()
