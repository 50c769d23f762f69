"""Runs OpenAI clients and load tools of others, unmodified, against a server of the embedded pair (`make clients` installs them)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.load_tools import TOOLS, Run, Shape
from tests.support import HANG, REPOSITORY, ServerProcess

pytestmark = pytest.mark.clients
PYTHON = REPOSITORY / ".venv-clients" / "bin" / "python"
TOKENIZER = REPOSITORY / "tandem" / "checkpoints" / "embedded_draft"
SAYS = {
    "instructor": ["tool_call 10", "tools_strict 10", "json_schema_mode 10"],
    "outlines": ["json, choice, regex, grammar, stream"],
    "litellm": ["chat, stream, completion, refusal"],
    "lm_eval": ["accuracy 1.0 of 3 texts"],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = ServerProcess(tmp_path_factory.mktemp("server"), "--role", "serve", "--http_port", "0")
    try:
        server.wait_ready(4 * HANG)
        yield f"http://127.0.0.1:{json.loads(server.ready_file.read_text())['http_port']}/v1"
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("client", SAYS)
def test_a_client_of_others_completes_unmodified(client: str, url: str, tmp_path: Path) -> None:
    script = REPOSITORY / "tests" / "openai" / "others" / f"{client}_client.py"
    command = [PYTHON, script, url, TOKENIZER]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=4 * HANG)
    assert ran.returncode == 0, ran.stderr[-4000:]
    said = [line for line in ran.stdout.splitlines() if line in SAYS[client]]
    assert said == SAYS[client], ran.stdout[-4000:]


@pytest.mark.parametrize("name", TOOLS)
def test_a_load_tool_of_others_completes_unmodified(name: str, url: str, tmp_path: Path) -> None:
    tool, shape = TOOLS[name], Shape("short", mean_input_tokens=32, mean_output_tokens=24)
    run = Run(url.removesuffix("/v1"), "SmolLM2-135M-Instruct", str(TOKENIZER), shape, requests=8, seconds=120, users=4)
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | tool.environment()
    command = tool.command(PYTHON.parent, run, tmp_path)
    ran = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=4 * HANG)
    assert ran.returncode == 0, ran.stderr[-4000:]
    figures = tool.figures(tmp_path)
    assert (figures.completed, figures.errors) == (8, 0)
    assert figures.output_tokens == 24 and figures.ttft_p50_ms and figures.itl_p50_ms
