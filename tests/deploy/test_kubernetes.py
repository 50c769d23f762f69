"""The manifests of deploy/k8s: valid, complete, and with flags that our programs know. No cluster is needed."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tandem.cli import compare, main
from tandem.comparison.measuring.architectures import CONNECTABLE, OPENAI
from tests.daily import daily
from tests.deploy import in_image
from tests.deploy.kustomize import LOADER, containers
from tests.deploy.manifests import (
    FOLDERS,
    K8S,
    NEWEST,
    OLDEST,
    ROOT,
    filled,
    objects,
    valid,
    values_of,
)

KUBECTL = shutil.which("kubectl")


def programs() -> list[tuple[str, str, list[str]]]:
    """(folder, container, command line) of every container that runs a program of ours, variables filled in."""
    found = []
    for folder in FOLDERS:
        models = values_of(folder)
        for container in containers(objects(folder)):
            words = [*container.get("command", ()), *container.get("args", ())]
            line = [filled(word, models) for word in words]
            if any(word.endswith(".py") for word in line):
                found.append((folder, container["name"], line))
    return found


PROGRAMS = programs()


def parser_of(program: str) -> argparse.ArgumentParser:
    return compare.build_parser() if program == "compare_architectures.py" else main.parser()


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(folder: str, version: str) -> None:
    assert objects(folder)
    for each in objects(folder):
        valid(each, version)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is absent: overlays are built by tests/deploy/kustomize.py alone")
@pytest.mark.parametrize("folder", daily(FOLDERS, *range(0, len(FOLDERS), 5)))
def test_kubectl_builds_the_same_objects(folder: str) -> None:
    built = subprocess.run(
        [KUBECTL or "", "kustomize", str(K8S / folder)], capture_output=True, text=True, check=True, timeout=60
    )
    theirs = list(yaml.load_all(built.stdout, LOADER))

    def by_name(each: dict[str, Any]) -> tuple[str, str]:
        return each["kind"], each["metadata"]["name"]

    assert sorted(theirs, key=by_name) == sorted(objects(folder), key=by_name)


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
        asked = set(arguments.architectures.split(","))
        assert asked == {each.partition("=")[0] for each in arguments.connect} <= {*CONNECTABLE, OPENAI.name}


@pytest.mark.parametrize("image", in_image.BASES)
def test_an_image_has_what_servers_and_comparison_jobs_import(image: str) -> None:
    present = in_image.closure([*in_image.BASES[image], *in_image.installs(image)])
    assert {"grpcio", "prometheus-client", "protobuf", "torch", "h11", "uvicorn", "llguidance"} <= present
    assert {"jinja2", "rich", "cryptography"} <= present
    assert not {"pytest", "ray"} & present
