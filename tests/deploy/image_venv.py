"""The environment of an image of deploy/Dockerfile, as far as its pip steps make it, in a virtual environment here.

The steps are taken from the container file and run in its order, with a copy of the files that it copies. Where AWS's
index would be asked, the stand-ins of tests/deploy/wheels.py are found. uv's steps are run by pip. The interpreter is
the one that runs this: the images' own are 3.13 (torchneuron) and 3.12 (nxdi).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.deploy import wheels

ROOT = Path(__file__).resolve().parents[2]
INDEX_FLAGS = ("--index-strategy", "--extra-index-url")


@dataclass(frozen=True)
class Image:
    """`code` is the copy of the repository that the image would have in /opt/tandem."""

    name: str
    venv: Path
    code: Path

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    def environment(self, home: Path) -> dict[str, str]:
        own = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TANDEM", "VIRTUAL"))
        }
        path = f"{self.venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**own, "PATH": path, "HOME": str(home), "TANDEM_CACHE": str(home / "tandem"), "HF_HUB_OFFLINE": "1"}

    def run(self, *words: str, home: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.venv / "bin" / words[0]), *words[1:]],
            cwd=self.code,
            env=self.environment(home),
            capture_output=True,
            text=True,
            timeout=900,
            check=check,
        )


def find_or_build(name: str, folder: Path) -> Image:
    """Makes the environment below `folder`, or takes the one there, with the code of now.

    Raises CalledProcessError where a step fails.
    """
    image = Image(name, folder / "venv", folder / "opt-tandem")
    shutil.rmtree(image.code, ignore_errors=True)
    _copy(image.code)
    if (folder / "built").exists():
        return image
    subprocess.run([sys.executable, "-m", "venv", str(image.venv)], check=True)
    found = wheels.write(name, folder / "wheels")
    for step in (*_base(name), *steps(name)):
        words = [image.python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--find-links", str(found), *step]
        subprocess.run(words, cwd=image.code, check=True)
    (folder / "built").touch()
    return image


def _base(name: str) -> list[list[str]]:
    """What the image has before our steps: NxD Inference is in AWS's own."""
    if name != "nxdi":
        return []
    return [[f"{package.name}=={package.version}" for package in wheels.PACKAGES[name]]]


def steps(name: str) -> list[list[str]]:
    """The words of each `pip install` of a stage, without indexes."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    stage = next(part for part in re.split(r"^FROM ", text, flags=re.MULTILINE) if f" AS {name}\n" in part)
    found = []
    for command in re.split(r"^RUN |&&|\n(?=[A-Z#])", stage.replace("\\\n", " "), flags=re.MULTILINE):
        words = shlex.split(command) if "pip install" in command else []
        if "install" in words:
            found.append(_without_indexes(words[words.index("install") + 1 :]))
    return found


def _without_indexes(words: list[str]) -> list[str]:
    kept = list(words)
    for flag in INDEX_FLAGS:
        while flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
    return [word for word in kept if word != "--no-cache-dir"]


def _copy(code: Path) -> None:
    """The files of this checkout that `COPY . .` would copy."""
    patterns = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not ignored(Path(name), patterns):
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, code / name, follow_symlinks=False)


def ignored(path: Path, patterns: list[str]) -> bool:
    """Whether Docker leaves a file out: the last pattern that is of it or of a folder above it decides."""
    found = False
    for pattern in patterns:
        wanted = pattern.removeprefix("!").removeprefix("**/")
        parts = [*path.parents, path] if pattern.startswith("**/") else []
        whole = [str(each) for each in (*path.parents, path)]
        if any(fnmatch(each.name, wanted) for each in parts) or any(
            each.count("/") == wanted.count("/") and fnmatch(each, wanted) for each in whole
        ):
            found = not pattern.startswith("!")
    return found
