"""The command line: both spellings, roles, and refusals of one line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cli.roles import ROLES
from tests.daily import daily
from tests.support import GREEDY, REPOSITORY, launch, oracle, run_client, server_process

PROMPTS = ("the first prompt", "the second")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompt.txt").write_text("\n".join(["", PROMPTS[0], "   ", PROMPTS[1], ""]))
    return tmp_path


def latin(prompt: str, count: int) -> str:
    """The toy target's greedy text."""
    tokens = oracle(prompt.encode(), GREEDY, count)
    return "".join(bytes([t]).decode("latin-1") for t in tokens if t < 256)


def profile_rows(folder: Path) -> list[dict[str, str]]:
    (table,) = folder.glob("performance_*.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    written = json.loads(table.with_suffix(".json").read_text())
    assert [row["output_tokens"] for row in written] == [int(row["output_tokens"]) for row in rows]
    return rows


def test_help_names_every_role_and_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "sys.argv = ['main.py', '--role', 'client', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(REPOSITORY / 'main.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "heavy = {'torch', 'grpc', 'transformers', 'accelerate', 'numpy', 'google.protobuf'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for role in ROLES:
        assert role in done.stdout


def test_a_role_is_a_command_too_and_errors_carry_the_commands_name(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("client --max_new_tokens 0 --prompt x", "--role client --max_new_tokens 0 --prompt x"):
        assert main.main(line.split(), program="tandem") == 2
        assert capsys.readouterr().err == "tandem: max_new_tokens: 0 is below 1\n"
    with pytest.raises(SystemExit):
        main.main(["target", "--help"], program="tandem")
    assert capsys.readouterr().out.startswith("usage: tandem ROLE [flags]")


def test_a_missing_library_is_one_line_that_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "install_command", "install {}".format)
    for library, extra in (("torch", "torch"), ("tokenizers", "serve"), ("rich.table", "comparison")):

        def start(args: object, library: str = library) -> None:
            raise ModuleNotFoundError(f"No module named {library!r}", name=library)

        monkeypatch.setattr(main, "start", start)
        assert main.main(["doctor"], program="tandem") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"tandem: {library.partition('.')[0]} is not installed; install {extra}"


# --- one model alone ---


@pytest.mark.parametrize("role", daily(["verify_target", "verify_draft"], 0))
def test_a_single_model_prints_each_token_and_then_the_text(folder: Path, role: str) -> None:
    asked = ("--prompt_text", "prompt.txt", "--max_new_tokens", "6", "--profile")
    done = launch(folder, "--role", role, "--backend", "toy", "--model", "salt=0", *asked)
    assert done.returncode == 0, done.stderr
    for i, prompt in enumerate(PROMPTS):
        for token in oracle(prompt.encode(), GREEDY, 6):
            assert f"[{i}] token {token}: {bytes([token]).decode(errors='backslashreplace')!r}\n" in done.stdout
        assert f"[Prompt {i} output]:\n{latin(prompt, 6)}\n" in done.stdout
    assert len(profile_rows(folder)) == 2


# --- clients ---


def test_a_client_finds_out_which_service_answers_and_all_say_the_same(folder: Path) -> None:
    ask = ("--prompt_text", "prompt.txt", "--max_new_tokens", "12")
    with server_process(folder, "--role", "target", "--model", "step=0.002", ready_file="target.json") as target:
        address = target.wait_ready()
        with (
            server_process(folder, "--role", "fused_target", "--draft_model", "miss=0.4", ready_file="f.json") as fused,
            server_process(folder, "--role", "draft_worker", "--target_host", address, ready_file="d.json") as draft,
        ):
            outputs = [run_client(folder, *ask, "--port", str(s.port)) for s in (target, fused, draft)]
            wrong = run_client(folder, *ask, "--port", str(target.port), "--service", "DraftWorker")
    for done in outputs:
        assert done.returncode == 0, done.stderr
        final = done.stdout.split("=== Final outputs ===")[1]
        assert final == "".join(
            f"{'' if i else chr(10)}[Prompt {i} output]:\n{latin(prompt, 12)}\n\n" for i, prompt in enumerate(PROMPTS)
        )
    assert wrong.returncode == 1
    assert "UNIMPLEMENTED" in wrong.stderr and "Traceback" not in wrong.stderr


def test_one_prompt_streams_as_it_comes_and_a_refused_one_is_exit_code_1(folder: Path) -> None:
    with server_process(folder, "--role", "target", "--sequence_length", "32") as server:
        ask = ("--port", str(server.port), "--prompt", "hi", "--max_new_tokens")
        done = launch(folder, "--role", "client", *ask, "8")
        refused = run_client(folder, *ask, "50")
    assert (done.returncode, done.stdout) == (0, latin("hi", 8) + "\n")
    assert "8 tokens in" in done.stderr
    assert refused.returncode == 1
    assert "OUT_OF_RANGE" in refused.stderr and "50" in refused.stderr and "32" in refused.stderr
    assert "Traceback" not in refused.stderr


# --- refusals ---


def test_an_unusable_model_is_exit_code_2_and_one_line_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").write_text("not a model at all")
    assert main.main(["--role", "target", "--model", str(tmp_path / "m.gguf"), "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "m.gguf") in line


def test_a_hub_id_without_a_connection_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "https://127.0.0.1:1")
    monkeypatch.setattr("tandem.checkpoints.hub_files.getproxies", dict)
    assert main.main(["--role", "target", "--model", "nobody/nothing", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nobody/nothing: cannot be loaded" in line and "127.0.0.1 cannot be reached (Connection refused)" in line


def test_a_draft_role_looks_for_its_model_before_it_calls_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["draft", "--target_host", "127.0.0.1:1", "--model", "/nowhere", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "main.py: /nowhere: no such model folder\n"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--role target --dtype float8", "dtype"),
        ("--role target --threads 0", "threads"),
        ("--role draft_worker --tp_degree 2", "tp_degree: --role draft_worker with --backend torch"),
        ("--role target --backend jax", "backend"),
        ("--role target --backend toy --port 70000", "port: 70000"),
        ("--role target --backend toy --port 0 --sequence_length 1", "sequence_length: 1"),
        ("--role target --backend toy --port 0 --lease_seconds 0", "lease_seconds"),
        ("--role target --backend toy --step_seconds soon", "step_seconds: 'soon'"),
        ("--role target --backend toy --port 0 --draft_host nowhere", "draft_host: 'nowhere'"),
        ("--role target --backend toy --port 0 --draft_host a:b", "draft_host: 'a:b'"),
        ("--role target --backend toy --port 0 --draft_host 127.0.0.1:1 --draft_seconds 0", "draft_seconds: 0"),
        ("--role target --backend toy --port 0 --host 256.0.0.1 --insecure", "256.0.0.1"),
        ("--role target --backend toy --port 0 --model DIR", "DIR"),
        ("--role fused_target --draft ngram --draft_model x", "draft"),
        ("--role client", "prompt"),
        ("--role client --prompt_text EMPTY", "EMPTY"),
        ("--role client --prompt_text LATIN", "UTF-8"),
        ("--role client --prompt x --temperature -1", "temperature: -1"),
        ("--role client --prompt x --rule majority", "rule: 'majority'"),
        ("--role client --prompt x --drafts hybrid", "drafts: 'hybrid' is not one of auto, none, lookup"),
        ("--role client --prompt x --drafts none --speculation_length 3", "drafts: none, but speculation_length is 3"),
        ("--role client --prompt x --service Nobody", "Nobody"),
        ("--role draft --backend toy --prompt x --port 1 --connect_seconds 0.2", "127.0.0.1:1"),
    ],
)
def test_a_bad_argument_is_exit_code_2_and_one_line_that_names_it(
    arguments: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").write_text(" \n\n")
    (tmp_path / "LATIN").write_bytes(b"\xff\xfe prompt")
    assert main.main(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("main.py: ") and names in line
