"""--config FILE: the flags' names in YAML, the command line before it, and refusals that name file and flag."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cli.command_line import RoleParser
from tandem.cli.flags import Options


def parsed(folder: Path, text: str, *line: str) -> Options:
    (folder / "flags.yaml").write_text(text)
    return RoleParser().parse_args(main.with_role([*line, "--config", str(folder / "flags.yaml")]))


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], text: str, *line: str) -> str:
    (folder / "flags.yaml").write_text(text)
    assert main.main([*line, "--config", str(folder / "flags.yaml")]) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    return shown.replace(f"{folder}/", "")


def test_a_file_says_what_the_command_line_would(tmp_path: Path) -> None:
    text = """
    # of a server
    model: /models/one
    batch: 8
    top-p: 0.9
    step_seconds: auto
    prefix_sharing: off
    propose_only: false
    log_prompts: true
    drain_seconds: "12"
    adapters: [red=a, blue=b]
    """
    line = "fused_target --model /models/one --batch 8 --top_p 0.9 --step_seconds auto --prefix_sharing off"
    line += " --log_prompts --drain_seconds 12 --adapters red=a,blue=b"
    from_file = parsed(tmp_path, text, "fused_target")
    typed = RoleParser().parse_args(main.with_role(line.split()))
    for name in vars(typed).keys() - {"argv"}:
        assert getattr(from_file, name) == getattr(typed, name), name


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    text = "role: target\nport: 1\nprompt: [from the file, and this]\nspeculation_length: 3\nmax-new-tokens: 4\n"
    asked = parsed(tmp_path, text, "client", "--port=2", "--prompt", "-", "--gamma", "5", "--max_new_tokens", "6")
    assert (asked.role, asked.port, asked.prompt) == ("client", 2, ("-",))
    assert (asked.speculation_length, asked.max_new_tokens) == ("5", 6)
    asked = parsed(tmp_path, text, "client")
    assert (asked.port, asked.prompt, asked.speculation_length) == (1, ("from the file", "and this"), "3")
    assert "prompt" in asked.given and "top_p" not in asked.given


def test_the_arguments_that_start_a_role_again_have_what_was_in_the_file(tmp_path: Path) -> None:
    assert set(parsed(tmp_path, "batch: 3\n", "target").argv) == {"--role", "target", "--batch=3"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bach: 3", "config: flags.yaml: no flag is called 'bach'; did you mean batch?"),
        ("zzz: 3", "config: flags.yaml: no flag is called 'zzz'"),
        ("config: other.yaml", "config: flags.yaml: no flag is called 'config'"),
        ("prompt: x", "prompt: --role target does not take it; these do: client"),
        ("batch: many", "argument --batch: invalid int value: 'many'"),
        ("device: cudda", "device: 'cudda' is not one of auto, cpu, cuda, neuron; did you mean cuda?"),
        ("fast: maybe", "config: flags.yaml: fast: 'maybe' is neither true nor false"),
        ("model: {a: b}", "config: flags.yaml: model: not the value of a flag"),
        ("- batch", "config: flags.yaml: it must have lines `flag: value`"),
        ("", "config: flags.yaml: it must have lines `flag: value`"),
        ("a: [", "config: flags.yaml: while parsing"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_that_names_it(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        shown = refusal(tmp_path, capsys, text, "target")
    except SystemExit as ended:
        assert ended.code == 2
        (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"main.py: {why}"), shown


def test_a_file_that_cannot_be_read_and_a_missing_library_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, why in (("target --config", "config: give --config FILE"), (f"target --config {tmp_path}", "Is a dir")):
        assert main.main(line.split()) == 2
        (shown,) = capsys.readouterr().err.splitlines()
        assert why in shown
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "yaml is not installed; make setup" in refusal(tmp_path, capsys, "port: 1", "target")
