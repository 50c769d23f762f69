"""OpenAI clients of a target on NxD Inference: the commands of docs/trainium-nxdi.md, with the stand-in for it."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.runners.toy import ToyTokenizer
from tandem.speculation.types import SamplingParams
from tests.openai.gateway import COMPLETIONS, gateway
from tests.runners.nxdi.simulated import model_folder
from tests.support import GREEDY, HANG, REPOSITORY, ServerProcess, oracle

PAGE = REPOSITORY / "docs" / "trainium-nxdi.md"
STAND_IN = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
if any(word.endswith("main.py") for word in sys.orig_argv):
    import pytest
    from tandem.clients import encoding
    from tandem.engine import loading
    from tandem.runners.toy import ToyTokenizer
    from tests.runners.nxdi import simulated
    simulated.install(pytest.MonkeyPatch())
    loading.HuggingFaceTokenizer = lambda checkpoint: ToyTokenizer()
    encoding.target_tokenizer = lambda backend, model: ToyTokenizer()
"""
JSON = {"content-type": "application/json"}
FREE = {"--port": "0", "--engine_port": "0", "--http_port": "0", "--sequence_length": "128", "--batch": "1"}


def commands(block: int) -> list[list[str]]:
    """The words of the section's commands. Block 0: fused server, curl; 1: target, draft worker, gateway, curl."""
    section = PAGE.read_text(encoding="utf-8").partition("## OpenAI clients\n")[2].partition("\n## ")[0]
    return [shlex.split(line) for line in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[block].splitlines()]


def replaced(words: list[str], values: dict[str, str]) -> list[str]:
    """The arguments of main.py with other values for these flags."""
    flags = words[words.index("main.py") + 1 :]
    return [values.get(before, word) for before, word in zip(["", *flags], flags, strict=False)]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that a test starts have the stand-in."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tests.support.REPOSITORY", tmp_path / "site")  # ServerProcess's PYTHONPATH


@contextmanager
def server(folder: Path, words: list[str]) -> Iterator[ServerProcess]:
    folder.mkdir()
    process = ServerProcess(folder, *words)
    try:
        process.wait_ready(2 * HANG)
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def check(answer: dict[str, Any], asked: dict[str, Any], sampling: SamplingParams = GREEDY) -> None:
    """The answer has the target's own tokens."""
    tokens = oracle(ToyTokenizer().encode(asked["prompt"], chat=False), sampling, asked["max_tokens"])
    assert answer["usage"]["completion_tokens"] == len(tokens)
    # The toy says bytes at random: those that are no UTF-8 alone become U+FFFD.
    said = [ord(c) for c in answer["choices"][0]["text"] if c.isascii()]
    assert said == [token for token in tokens if token < 128]


@pytest.mark.usefixtures("stand_in")
def test_a_fused_pair_answers_an_openai_client_by_itself(tmp_path: Path) -> None:
    fused, curl = commands(0)
    models = {"--target_model": "Llama-3.1-8B", "--draft_model": "Llama-3.2-1B"}
    values = {flag: str(model_folder(tmp_path, name)) for flag, name in models.items()}
    with server(tmp_path / "fused", replaced(fused, FREE | values)) as pair:
        port = json.loads(pair.ready_file.read_text())["http_port"]
        assert curl[:2] == ["curl", f"http://127.0.0.1:8080{COMPLETIONS}"]
        asked = json.loads(curl[curl.index("-d") + 1])
        for sampling in (GREEDY, SamplingParams(temperature=0.8, seed=5)):  # by the graph, and by the models apart
            body = json.dumps(asked | {"temperature": sampling.temperature, "seed": sampling.seed}).encode()
            post = urllib.request.Request(f"http://127.0.0.1:{port}{COMPLETIONS}", body, JSON)
            with urllib.request.urlopen(post, timeout=HANG) as said:
                check(json.load(said), asked, sampling)


@pytest.mark.thorough
@pytest.mark.usefixtures("stand_in")
def test_the_pages_commands_answer_an_openai_client(tmp_path: Path) -> None:
    target, worker, front, curl = commands(1)
    model = str(model_folder(tmp_path, "Llama-3.1-8B"))
    with server(tmp_path / "target", replaced(target, {**FREE, "--model": model})) as verifier:
        values = {**FREE, "--target_model": model, "--target_port": str(verifier.port)}
        with server(tmp_path / "worker", replaced(worker, values)) as before:
            engine = json.loads(before.ready_file.read_text())["engine_port"]
            arguments = replaced(front, {"--workers": f"127.0.0.1:{engine}"})
            flags = [*arguments[arguments.index("--workers") :][:2]]
            assert curl[:2] == ["curl", f"http://127.0.0.1:8080{COMPLETIONS}"]
            asked = json.loads(curl[curl.index("-d") + 1])
            with gateway(tmp_path, *flags) as gate:
                answered = gate.send(COMPLETIONS, asked)
    assert answered.status == 200, answered.body
    check(answered.json, asked)
