"""Environments of their own, and the packages that are installed into them."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import HANG, REPOSITORY

UNREACHABLE = ("No matching distribution found", "Could not fetch URL", "Failed to establish a new connection")


def build_wheels(folder: Path, *packages: str, **options: str) -> Path:
    """Has packages/build.py build wheels into a folder. Skips the test if the package index cannot be reached."""
    more = [word for name, value in options.items() for word in (f"--{name}", value)]
    script = [sys.executable, REPOSITORY / "packages" / "build.py", folder, "--no-isolation", "--only", *packages]
    _done([*script, *more])
    return folder


def repack(folder: Path, names: Iterable[str]) -> None:
    """Makes wheels of what is installed here, and of what it needs, for installs without an index."""
    todo, seen = list(names), set[str]()
    while todo:
        if (name := canonicalize_name(todo.pop())) in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        needs = map(Requirement, found.requires or ())
        todo += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        tag = re.findall(r"^Tag: (.*)$", found.read_text("WHEEL") or "", re.MULTILINE)[-1]
        with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{found.version}-{tag}.whl", "w") as wheel:
            for each in found.files or ():
                if ".." not in each.parts and each.suffix != ".pyc":
                    wheel.write(str(each.locate()), str(each))


def pins(folder: Path) -> Path:
    """A file of constraints: the versions that are pinned for development."""
    names = ("requirements-serve.txt", "requirements-compare.txt", "requirements.txt", "constraints.txt")
    lines = [line for name in names for line in (REPOSITORY / name).read_text(encoding="utf-8").splitlines()]
    file = folder / "pins.txt"
    file.write_text("\n".join(line for line in lines if "[" not in line and not line.startswith("-")))
    return file


def pip(python: Path | str, *arguments: str | Path) -> None:
    """Runs pip for an interpreter. Skips the test if the package index cannot be reached."""
    _done([sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *arguments])


def _done(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=8 * HANG, check=False)
    text = done.stdout + done.stderr
    indexed = "PIP_NO_INDEX" not in os.environ and "found for tandem-speculative" not in text
    if done.returncode and indexed and any(said in text for said in UNREACHABLE):
        pytest.skip("no package index is reachable")
    assert done.returncode == 0, text


def run(python: Path, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs an interpreter, or a console script beside it, in `folder`, without this checkout on its path."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = python.parent / arguments[0] if arguments[0] == "tandem" else python
    rest = arguments[1:] if arguments[0] == "tandem" else arguments
    return subprocess.run(
        [program, *rest],
        cwd=folder,
        env={**clean, **variables},
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
    )


def output(python: Path, folder: Path, *arguments: str, **variables: str) -> str:
    done = run(python, folder, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def environment(folder: Path, borrow: bool = False) -> Path:
    """The interpreter of a fresh environment; with `borrow`, it also sees what is installed in this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    if borrow:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    return python
