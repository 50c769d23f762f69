"""A server whose target is shared by two processes, started by main.py or torchrun: the tokens of one process."""

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
from tandem.engine.loading import load
from tandem.engine.model_config import ModelConfig
from tandem.rpc.generation_client import GenerationClient
from tandem.runners.loading import Execution, Shape
from tandem.speculation.types import GenerationRequest, SamplingParams
from tests.runners.tiny import model_folder
from tests.support import REPOSITORY, answer, run

FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--compile", "off", "--sequence_length", "96")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
REQUESTS = [
    GenerationRequest(text="shared", max_new_tokens=20, ignore_end_of_sequence=True),
    GenerationRequest(text="by two", max_new_tokens=20, sampling=SAMPLED, ignore_end_of_sequence=True),
]


class SharedServer:
    """main.py, alone or under torchrun."""

    def __init__(self, folder: Path, torchrun: bool, *arguments: str) -> None:
        self.ready, self.log = folder / "ready.json", folder / "server.log"
        twice = [sys.executable]
        if torchrun:
            twice += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        own = [str(REPOSITORY / "main.py"), "--tp_degree", "2", "--port", "0", "--ready_file", str(self.ready)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*twice, *own, *FLAGS, *arguments], cwd=folder, stdout=log, stderr=log)

    def wait_ready(self, seconds: float = 100.0) -> str:
        give_up = time.monotonic() + seconds
        while not self.ready.exists():
            assert self.process.poll() is None and time.monotonic() < give_up, self.log.read_text()
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
@pytest.mark.parametrize(("role", "torchrun"), [("target", False), ("fused_target", True)])
def test_a_shared_target_answers_as_one_process_does_and_stops_when_it_is_told(
    tmp_path: Path, role: str, torchrun: bool
) -> None:
    target, draft = model_folder(tmp_path / "target", 1), model_folder(tmp_path / "draft", 2)
    models = ("--target_model", str(target), *(("--draft_model", str(draft)) if role == "fused_target" else ()))
    server = SharedServer(tmp_path, torchrun, "--role", role, *models, "--batch", "2", "--max_speculation_length", "3")
    try:
        address = server.wait_ready()
        service = "TargetVerifier" if role == "target" else "FusedSpeculativeServer"
        assert run(asked(address, service)) == run(alone(target))
        os.kill(server.facts["pid"], signal.SIGTERM)
        assert server.process.wait(30) == 0, server.log.read_text()
        assert "[rank 1] rank 1 follows" in server.log.read_text() and "stopped" in server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()
