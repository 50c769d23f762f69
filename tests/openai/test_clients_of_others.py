"""Runs OpenAI clients, agents and load tools of others, unmodified, against a server; `make clients` installs them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.load_tools import TOOLS, Run, Shape
from tests.openai.scripted import TEMPLATES
from tests.support import HANG, MAIN, REPOSITORY, ServerProcess

pytestmark = pytest.mark.clients
CLIENTS = REPOSITORY / ".venv-clients"
PYTHON, AGENTS_PYTHON = CLIENTS / "bin" / "python", CLIENTS / "agents" / "bin" / "python"
OTHERS = REPOSITORY / "tests" / "openai" / "others"
TOKENIZER = REPOSITORY / "tandem" / "checkpoints" / "embedded_draft"
SAYS = {
    "instructor": ["tool_call 10", "tools_strict 10", "json_schema_mode 10"],
    "outlines": ["json, choice, regex, grammar, stream"],
    "litellm": ["chat, stream, completion, refusal"],
    "lm_eval": ["3 texts"],
}
LOOPS = [
    (PYTHON, "openai", 18),
    (PYTHON, "litellm_tools", 4),
    (PYTHON, "llama_index", 8),
    (AGENTS_PYTHON, "openai", 18),
    (AGENTS_PYTHON, "openai_agents", 2),
    (AGENTS_PYTHON, "langchain", 2),
    (AGENTS_PYTHON, "pydantic_ai", 2),
    ("node", "ai", 4),
]
"""What runs an agent, its name, and how many loops it runs: a question, a call of a tool, and the text that ends it."""
FORMATS = [(name, *loop) for name in ("plain", "hermes") for loop in LOOPS]
FORMATS += [(name, *LOOPS[0]) for name in sorted(TEMPLATES.keys() - {"plain", "hermes"})]


def serving(folder: Path, *arguments: str, program: tuple[str, ...] = (MAIN,)) -> Iterator[str]:
    server = ServerProcess(folder, "--role", "serve", "--http_port", "0", *arguments, program=program)
    try:
        server.wait_ready(4 * HANG)
        yield f"http://127.0.0.1:{json.loads(server.ready_file.read_text())['http_port']}/v1"
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serving(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def scripted_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model calls `weather`; its template tells it of tools in its own format, or Tandem does."""
    program = ("-m", "tests.openai.scripted", request.param)
    long = ("--backend", "toy", "--port", "0", "--sequence_length", "16384")  # of bytes
    yield from serving(tmp_path_factory.mktemp("scripted"), *long, program=program)


def lines_of(interpreter: Path | str, name: str, folder: Path, *arguments: str) -> list[str]:
    """What a client prints."""
    command, script = [str(interpreter), str(OTHERS / f"{name}_client.py")], None
    if interpreter == "node":  # what a program on its standard input imports is looked for where it runs
        command, folder = ["node", "--input-type=module", "-"], CLIENTS
        script = (OTHERS / f"{name}_client.mjs").read_text()
    ran = subprocess.run(
        [*command, *arguments], input=script, cwd=folder, capture_output=True, text=True, timeout=4 * HANG
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout.splitlines()


@pytest.mark.parametrize(("scripted_url", "interpreter", "agent", "loops"), FORMATS, indirect=["scripted_url"])
def test_an_agent_of_others_runs_whole_loops_unmodified(
    scripted_url: str, interpreter: Path | str, agent: str, loops: int, tmp_path: Path
) -> None:
    said = [line for line in lines_of(interpreter, agent, tmp_path, scripted_url) if "Provider List" not in line]
    assert list(filter(None, said)) == ["It is sunny in Paris."] * loops + [f"{loops} calls"]


def test_an_agent_that_requires_a_call_of_the_embedded_model_runs_whole_loops(url: str, tmp_path: Path) -> None:
    calls, word = lines_of(AGENTS_PYTHON, "openai_agents", tmp_path, url, "required")[-1].split()
    assert (int(calls) >= 2, word) == (True, "calls")  # its second turn is free to call


@pytest.mark.parametrize("client", SAYS)
def test_a_client_of_others_completes_unmodified(client: str, url: str, tmp_path: Path) -> None:
    lines = lines_of(PYTHON, client, tmp_path, url, str(TOKENIZER))
    assert [line for line in lines if line in SAYS[client]] == SAYS[client], lines


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
