"""Recipes agree with themselves: plans are the program's output, and comparisons load the page's compiled models."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cli.command_line import RoleParser
from tandem_nxdi.shapes import Build
from tests.pages import checks
from tests.pages.commands import BLOCK, RECIPES, ROOT, Command, commands_of
from tests.planning.support import CONFIGS


def plan_output(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    command = Command(ROOT, line.replace("/models/", f"{CONFIGS}/"))
    assert main.main(command.arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_the_plans_of_a_page_are_the_programs_output(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs, shown = "", 0
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "bash":
            plans = [line for line in block.splitlines() if "--role plan" in line]
            outputs = "".join(plan_output(line, capsys) for line in plans) or outputs
            continue
        lines = block.splitlines()
        assert [line for line in lines if line not in outputs] == []
        shown += len(lines)
    assert shown > 2


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_comparison_of_a_page_loads_what_the_page_compiled(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is named by the configuration it was compiled for; any other is compiled again, for hours."""
    monkeypatch.chdir(ROOT)
    made: list[Build] = []
    compared: list[Build] = []
    for command in commands_of(page):
        if command.program == "compare_architectures.py" and "nxdi" in command.words:
            servers = [words for words in checks.compared_servers(command, monkeypatch) if "nxdi" in words]
            compared += [checks.nxdi_build(RoleParser().parse_args(words)) for words in servers]
        elif command.program == "main.py" and "nxdi" in command.words and "plan" not in command.words:
            made.append(checks.nxdi_build(RoleParser().parse_args(command.arguments)))

    def shape(build: Build) -> tuple[object, ...]:
        return build.kind, build.neuron["tp_degree"], build.neuron["batch_size"]

    alike = [build for build in compared if shape(build) in map(shape, made)]
    assert any(build.draft is not None for build in alike)
    assert [build for build in alike if build not in made] == []


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_model_that_a_command_names_was_downloaded_or_made_before(page: Path) -> None:
    made = {"compiled", "Llama-3.1-8B-int8"}  # folders that the programs fill
    for command in commands_of(page):
        assert "/mnt/" not in command.line, "no page mounts anything"
        for before, word in itertools.pairwise(command.words):
            for name in re.findall(r"/models/([\w.-]+)", word):
                if before in ("--local-dir", "--output"):
                    made.add(name)
                elif "plan" not in command.words:  # a plan reads config.json, which the hub shows
                    assert name in made, command.line
