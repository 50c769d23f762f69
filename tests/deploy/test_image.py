"""The container file, as far as can be told without building it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()


def test_every_base_is_pinned() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", FILE.split("\nFROM ")[0], re.MULTILINE))
    bases = [re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], base) for base in re.findall(r"^FROM (\S+)", FILE, re.M)]
    assert len(bases) == 3
    assert all(re.search(r":\d[\w.-]+$", base) for base in bases), bases


def test_nothing_that_runs_is_left_out() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    needed = {name.split(".")[0] for name in setuptools["packages"]} | set(setuptools["package-dir"].values())
    needed |= {"main.py", "compare_architectures.py"}
    assert needed >= {"tandem", "services", "clients"} and all((ROOT / name).exists() for name in needed)
    assert re.findall(r"^COPY \. \.$", FILE, re.MULTILINE) == ["COPY . ."] * 2
    assert needed & set(IGNORED) == set()
    assert {".git", ".venv", "secrets"} <= set(IGNORED), "deploy/secrets.sh writes private keys there"


def test_no_placeholder_of_pypi_can_be_installed() -> None:
    asked = dict(re.findall(r'"(torch-neuronx|neuronx-cc|nki)==([\d.]+)\.\*"', FILE))
    assert set(asked) == {"torch-neuronx", "neuronx-cc", "nki"}
    placeholders = {"torch-neuronx": "1.", "neuronx-cc": "1.", "nki": "0.0"}
    assert [name for name, version in asked.items() if version.startswith(placeholders[name])] == []


def test_the_manifests_run_images_that_the_file_says_how_to_build() -> None:
    built = set(re.findall(r"-t tandem:(\S+) \.", FILE))
    overlays = (ROOT / "deploy" / "k8s" / "overlays").glob("*/kustomization.yaml")
    used = {image["newTag"] for path in overlays for image in yaml.safe_load(path.read_text()).get("images", ())}
    assert used == built
