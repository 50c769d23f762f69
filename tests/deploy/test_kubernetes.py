"""The manifests of deploy/k8s: valid, complete, and with flags that our programs know. No cluster is needed."""

from __future__ import annotations

import argparse

import pytest

from tandem.cli import compare
from tandem.cli.command_line import RoleParser
from tandem.comparison.measuring.architectures import CONNECTABLE, OPENAI
from tests.deploy.manifests import FOLDERS, NEWEST, OLDEST, ROOT, containers, filled, objects, valid, values_of


def programs() -> list[tuple[str, str, list[str]]]:
    """(folder, container, command line) of every container that runs a program of ours, variables filled in."""
    found = []
    for folder in FOLDERS:
        models = values_of(folder)
        for container in containers(folder):
            words = [*container.get("command", ()), *container.get("args", ())]
            line = [filled(word, models) for word in words]
            if any(word.endswith(".py") for word in line):
                found.append((folder, container["name"], line))
    return found


PROGRAMS = programs()


def parser_of(program: str) -> argparse.ArgumentParser:
    return compare.build_parser() if program == "compare_architectures.py" else RoleParser()


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(folder: str, version: str) -> None:
    assert objects(folder)
    for each in objects(folder):
        valid(each, version)


@pytest.mark.parametrize(("folder", "container", "line"), PROGRAMS, ids=lambda value: str(value)[:40])
def test_a_programs_flags_are_its_own(folder: str, container: str, line: list[str]) -> None:
    at = next(i for i, word in enumerate(line) if word.endswith(".py"))
    assert (ROOT / line[at]).is_file()
    assert not any("$(" in word for word in line), "a variable that nobody sets"
    arguments = parser_of(line[at]).parse_args(line[at + 1 :])
    before = dict(word.partition("=")[::2] for word in line[:at])
    if line[at] == "main.py":
        processes = (
            1 if arguments.backend == "nxdi" else arguments.tp_degree
        )  # NxD Inference's is one, whatever the degree
        assert int(before.get("--nnodes", 1)) * int(before.get("--nproc-per-node", 1)) == processes
        assert (line[0] == "torchrun") == (processes > 1)
    else:
        compare.refuse_unused_flags(arguments)
        asked = set(arguments.architectures)
        assert asked == {each.partition("=")[0] for each in arguments.connect} <= {*CONNECTABLE, OPENAI.name}
