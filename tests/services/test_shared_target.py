"""A server whose target is shared by two processes: torchrun, main.py, gRPC, and the tokens of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from clients.generation import GenerationClient
from models.assembly import ModelConfig, load
from models.batcher import Batcher
from models.generators import plain_generator
from models.loading import Execution, Shape
from speculation.types import GenerationRequest, SamplingParams
from tests.support import REPOSITORY, answer, run

FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--compile", "off", "--sequence_length", "96")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
REQUESTS = [
    GenerationRequest(text="shared", max_new_tokens=20, ignore_end_of_sequence=True),
    GenerationRequest(text="by two", max_new_tokens=20, sampling=SAMPLED, ignore_end_of_sequence=True),
]


def model_folder(folder: Path, seed: int) -> Path:
    """A Llama over bytes whose choices are clear."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(("<pad>", "<end>", *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=258, num_hidden_layers=2, eos_token_id=1, **sizes))
    module.lm_head.weight.data *= 10
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    module.save_pretrained(folder)
    return folder


class SharedServer:
    """main.py under torchrun."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.ready, self.log = folder / "ready.json", folder / "server.log"
        twice = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
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


@pytest.mark.timeout(200)
@pytest.mark.parametrize("role", ["target", pytest.param("fused_target", marks=pytest.mark.slow)])
def test_a_shared_target_answers_as_one_process_does_and_stops_when_it_is_told(tmp_path: Path, role: str) -> None:
    target, draft = model_folder(tmp_path / "target", 1), model_folder(tmp_path / "draft", 2)
    models = ("--target_model", str(target), *(("--draft_model", str(draft)) if role == "fused_target" else ()))
    server = SharedServer(tmp_path, "--role", role, *models, "--batch", "2", "--max_speculation_length", "3")
    try:
        address = server.wait_ready()
        service = "TargetVerifier" if role == "target" else "FusedSpeculativeServer"
        assert run(asked(address, service)) == run(alone(target))
        os.kill(server.facts["pid"], signal.SIGTERM)
        assert server.process.wait(30) == 0, server.log.read_text()
        assert "rank 1 follows" in server.log.read_text() and "stopped" in server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()
