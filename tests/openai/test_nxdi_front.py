"""OpenAI clients of a target on NxD Inference: the commands of docs/trainium-nxdi.md, with the stand-in for it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.runners.toy import ToyTokenizer
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
    loading.load_tokenizer = lambda checkpoint: ToyTokenizer()
    encoding.target_tokenizer = lambda backend, model: ToyTokenizer()
"""
FREE = {"--port": "0", "--engine_port": "0", "--sequence_length": "128", "--batch": "1"}


def commands() -> list[list[str]]:
    """The words of the section's four commands: target, draft worker, gateway, curl."""
    section = PAGE.read_text(encoding="utf-8").partition("## OpenAI clients\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


def replaced(words: list[str], values: dict[str, str]) -> list[str]:
    """The arguments of main.py with other values for these flags."""
    flags = words[words.index("main.py") + 1 :]
    return [values.get(before, word) for before, word in zip(["", *flags], flags, strict=False)]


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


@pytest.mark.thorough
def test_the_pages_commands_answer_an_openai_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, worker, front, curl = commands()
    model = str(model_folder(tmp_path, "Llama-3.1-8B"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tests.support.REPOSITORY", tmp_path / "site")  # ServerProcess's PYTHONPATH
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
    tokens = oracle(ToyTokenizer().encode(asked["prompt"], chat=False), GREEDY, asked["max_tokens"])
    assert answered.json["usage"]["completion_tokens"] == len(tokens)
    # The toy says bytes at random: those that are no UTF-8 alone become U+FFFD.
    assert [ord(c) for c in answered.text if c.isascii()] == [token for token in tokens if token < 128]
