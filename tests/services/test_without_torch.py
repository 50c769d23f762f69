"""Servers of native steps, and their clients, in processes that can import neither torch nor transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tandem.installing import install_command
from tandem.runners.eagle.module import write_head
from tests.adapters import lora_tensors, write_adapter
from tests.daily import daily
from tests.runners.test_eagle import a_head
from tests.runners.tiny import byte_tokenizer, model_folder
from tests.support import HANG, REPOSITORY, ServerProcess

PROGRAM = str(REPOSITORY / "tests/without_torch.py")
PROMPT, COUNT = "It is a", 24
SIZES = ("--sequence_length", "96", "--threads", "1", "--dtype", "float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft, an EAGLE-3 head and an adapter, made with torch."""
    folder = tmp_path_factory.mktemp("models")
    model_folder(folder / "target", seed=5)
    model_folder(folder / "draft", seed=6)
    write_head(folder / "head", a_head())
    module = AutoModelForCausalLM.from_pretrained(folder / "target")
    write_adapter(folder / "adapter", lora_tensors(module, 1))
    return folder


@pytest.fixture(scope="module")
def wanted(models: Path) -> str:
    """What transformers says, greedily."""
    module, tokenizer = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32), byte_tokenizer()
    asked = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    said = module.generate(asked, max_new_tokens=COUNT, do_sample=False, pad_token_id=0)[0, asked.shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


class Servers:
    """Starts servers without torch, and stops them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack, self._count = folder, stack, 0

    def start(self, *flags: str) -> ServerProcess:
        self._count += 1
        server = ServerProcess(
            self._folder, "--port", "0", *flags, ready_file=f"{self._count}.json", program=(PROGRAM,)
        )
        self._stack.callback(server.stop)
        server.wait_ready()
        return server

    def asked(self, port: int, *flags: str) -> str:
        """What the client prints on its standard output, without torch too."""
        return without_torch(
            *("--role", "client", "--port", str(port), "--prompt", PROMPT, "--max_new_tokens", str(COUNT)), *flags
        ).stdout


def without_torch(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    command = [sys.executable, PROGRAM, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment)


@pytest.mark.parametrize("draft", daily(["model", "eagle", "ngram"], 0))
def test_a_fused_pair_says_what_transformers_says(draft: str, models: Path, wanted: str, servers: Servers) -> None:
    which = {"model": ("--draft_model", str(models / "draft")), "eagle": ("--draft_model", str(models / "head"))}
    flags = ("--role", "fused_target", "--model", str(models / "target"), "--draft", draft, *SIZES)
    server = servers.start(*flags, *which.get(draft, ()))
    assert wanted in servers.asked(server.port)


def test_http_and_structures_are_served(models: Path, servers: Servers) -> None:
    server = servers.start(
        *("--role", "fused_target", "--model", str(models / "target"), "--draft", "ngram", *SIZES, "--http_port", "0")
    )
    ready = json.loads(server.ready_file.read_text())
    body = {"model": "target", "prompt": PROMPT, "max_tokens": 12, "structured_outputs": {"regex": "[ab]{4}"}}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{ready['http_port']}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=HANG) as answer:
        said = json.load(answer)
    assert set(said["choices"][0]["text"]) <= set("ab") and len(said["choices"][0]["text"]) == 4


def test_what_needs_torch_is_refused_with_the_command_that_installs_it(models: Path, tmp_path: Path) -> None:
    other = GPT2LMHeadModel(GPT2Config(vocab_size=258, n_embd=32, n_layer=1, n_head=2))
    other.save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    for flags, why in (
        (("--model", str(tmp_path / "gpt2")), "models of type gpt2 (there are llama, mistral, "),
        (("--model", str(models / "target"), "--compile", "off"), "compile off on cpu"),
    ):
        ran = without_torch("--role", "target", "--port", "0", *SIZES, *flags)
        (line,) = ran.stderr.strip().splitlines()[-1:]
        assert ran.returncode == 2 and "Traceback" not in ran.stderr
        assert why in line and line.endswith(install_command("torch"))


def test_a_cache_that_cannot_be_written_is_named(models: Path) -> None:
    asked = ("--role", "verify_target", "--model", str(models / "target"), "--prompt", "x")
    done = without_torch(*asked, TANDEM_CACHE="/dev/null/x")
    assert (
        done.returncode == 2 and "/dev/null/x (Not a directory); name another folder with TANDEM_CACHE" in done.stderr
    )
    assert "torch" not in done.stderr.splitlines()[-1]
