"""Every command of docs/seeds.md is understood."""

from __future__ import annotations

import re

import pytest

from tests.recipes import ours, programs
from tests.recipes.page import ROOT, Command

PAGE = ROOT / "docs" / "seeds.md"
DOCUMENTS = {
    "The project before: distributed and fused on trn1.2xlarge": "choral-spec-readme.md",
    "Qwen3-32B on EKS": "eks-trn2-vllm-speculation.md",
    "Llama-3.1-405B on trn2.48xlarge": "nxdi-llama3.1-405b-fused-speculation.rst",
    "Qwen3-32B on trn2.48xlarge": "nxdi-qwen3-32b-speculation.rst",
    "NxD Inference's features": "nxdi-features-guide.rst",
}
PROGRAMS = ("python", "torchrun", *programs.OTHERS)
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))


def rows(heading: str) -> list[tuple[str, str]]:
    """Of a section's table: what the seed has, and what is here."""
    lines = [line for line in SECTIONS[heading].splitlines() if line.startswith("| ")][1:]
    return [(line.strip("| ").split(" | ")[0], " | ".join(line.strip("| ").split(" | ")[1:])) for line in lines]


ROWS = [row for heading in DOCUMENTS for row in rows(heading)]
COMMANDS = [
    Command(PAGE, code)
    for _, here in ROWS
    for code in re.findall(r"`([^`]+)`", here)
    if code.split()[0] in PROGRAMS and len(code.split()) > 1
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.line[:60])
def test_a_command_of_a_row_is_understood(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = ours.check(command, monkeypatch) if command.program.endswith(".py") else programs.check(command.words)
    assert checked
