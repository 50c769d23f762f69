"""The packages that an image of deploy/Dockerfile has, by its pip steps and this environment's metadata."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
BASES = {"torchneuron": ("torch",), "nxdi": ("torch", "transformers", "safetensors", "sentencepiece")}
"""What the image has before our pip steps: of TorchNeuron's wheels and NxD Inference's image, by their requirements."""


def installs(image: str) -> list[str]:
    """The requirements of an image's pip steps, our own package's extras and dependencies in place of its name."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    stage = next(part for part in re.split(r"^FROM ", text, flags=re.MULTILINE) if f" AS {image}\n" in part)
    found: list[str] = []
    for line in re.findall(r"(?:^RUN|&&)[^&]*?pip install ((?:.*\\\n)*.*)", stage, re.MULTILINE):
        found += asked(shlex.split(line.split("&&")[0].replace("\\\n", " ")))
    return found


def asked(words: Sequence[str]) -> list[str]:
    """What the words of a pip install ask for."""
    found: list[str] = []
    for word in words:
        if word.startswith("requirements"):
            lines = (ROOT / word).read_text(encoding="utf-8").splitlines()
            found += [Requirement(one).name for one in lines if re.match(r"[a-z]", one)]
        elif word.startswith("."):
            extras = re.findall(r"\[(.*)\]", word)
            found += ours(extras[0].split(",") if extras else [], "--no-deps" in words)
        elif re.match(r"[a-z][a-z0-9-]+(==.*)?$", word) and word not in ("unsafe-best-match", "constraints.txt"):
            found.append(re.sub(r"==.*", "", word))
    return found


def ours(extras: Iterable[str], alone: bool) -> list[str]:
    """The requirements of our own package with these extras; an extra may name others."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [] if alone else [Requirement(line).name for line in project["dependencies"]]
    for extra in extras:
        for need in map(Requirement, project["optional-dependencies"][extra]):
            found += ours(need.extras, True) if need.name == project["name"] else [need.name]
    return found


def closure(names: Iterable[str]) -> set[str]:
    """All distributions of this environment that these bring."""
    todo, found = [canonicalize_name(name) for name in names], set[str]()
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for line in requires:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(canonicalize_name(need.name))
    return found
