"""What the README's first commands rest on: make targets, pins, ranges."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from packages import install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SETS = ("requirements-serve.txt", "requirements-compare.txt", "requirements.txt")
"""Each has the one before it, by a line -r."""
SETUP_FILES = ("Makefile", *SETS, "constraints.txt", "requirements-weights.txt", "requirements-stubs.txt")
"""Those of SETS, in the environment."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
NEEDS_MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="make is absent: apt install make")


def pins_in(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith(("#", "-c ", "-r "))]


def declared() -> dict[str, SpecifierSet]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    requirements = [Requirement(line) for group in groups for line in group]
    ranges: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    for requirement in requirements:
        if not requirement.name.startswith(PROJECT["name"]):  # the others are made by packages/build.py
            ranges[canonicalize_name(requirement.name)] &= requirement.specifier
    return ranges


def pinned_for(python: str, *files: str) -> dict[str, list[str]]:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pins = defaultdict(list)
    for requirement in (pin for name in files for pin in pins_in(name)):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", f"{requirement} is no pin"
            pins[canonicalize_name(requirement.name)].append(specifier.version)
    return pins


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    }
    return subprocess.run(["make", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def interpreter(folder: Path, version: str) -> Path:
    """A stand-in for a Python of that version: it answers what the Makefile asks of it."""
    path = folder / f"python{version}"
    major, minor = version.split(".")
    path.write_text(
        f'#!{sys.executable}\nimport sys\nsys.version_info = ({major}, {minor}, 0, "final", 0)\n'
        f'if sys.argv[1] == "--version":\n    print("Python {version}.0")\n'
        'elif sys.argv[1] == "-c":\n    exec(sys.argv[2])\n'
        'else:\n    print("called with", *sys.argv[1:])\n    sys.exit(7)\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in SETUP_FILES:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("python", PYTHONS)
def test_every_declared_dependency_has_one_pin_inside_its_range(python):
    pins, ranges = pinned_for(python, *SETS, "requirements-graphs.txt"), declared()
    assert set(pins) == set(ranges), "requirements*.txt and pyproject.toml name different packages"
    for name, versions in pins.items():
        assert len(versions) == 1, f"{name} is pinned {len(versions)} times for Python {python}"
        assert ranges[name].contains(versions[0]), f"{name}=={versions[0]} is outside {ranges[name]}"


def test_the_packages_to_install_are_those_on_disk():
    """services/, clients/ and workshops/ are links inside tandem/, and are packaged from where they are."""
    tools, elsewhere = TOOLS["setuptools"], {f"tandem/{top}": top for top in ("services", "clients", "workshops")}
    found = {path.parent.relative_to(ROOT) for path in (ROOT / "tandem").rglob("*.py")}
    for inside, top in elsewhere.items():
        assert (ROOT / inside).is_symlink() and (ROOT / inside).resolve() == ROOT / top
        found |= {Path(inside, path.parent.relative_to(ROOT / top)) for path in (ROOT / top).rglob("*.py")}
    assert {".".join(folder.parts) for folder in found} == set(tools["packages"])
    assert tools["package-dir"] == {inside.replace("/", "."): top for inside, top in elsewhere.items()}
    assert "py-modules" not in tools


def test_every_make_target_that_a_document_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    documents = [readme, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))]
    code = [snippet for text in documents for snippet in re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL)]
    named = {name for snippet in code for name in re.findall(r"(?:^|[`\s])make (?:-s )?([a-z][a-z-]*)", snippet)}
    assert named <= targets
    first = re.findall(r"^(?:\$ )?make ([a-z]+)", readme, flags=re.MULTILINE)[:2]
    assert first == ["compare", "test"], "the README's first two commands"


@NEEDS_MAKE
@pytest.mark.parametrize("version", ["2.7", "3.9", "3.15"])
def test_a_python_out_of_range_is_refused_in_words(checkout, version):
    python = interpreter(checkout, version)
    result = make("-s", "setup", f"PYTHON={python}", cwd=checkout)
    assert result.returncode != 0
    assert f"Tandem needs Python 3.10, 3.11, 3.12, 3.13 or 3.14; {python} is none of them" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (checkout / ".venv").exists()


def test_each_set_has_the_smaller_one_and_only_the_largest_has_torch():
    for smaller, larger in itertools.pairwise(SETS):
        assert f"\n-r {smaller}\n" in (ROOT / larger).read_text(encoding="utf-8")
    light = {pin.name for name in SETS[:2] for pin in pins_in(name)}
    assert light & {"torch", "transformers", "ray", "mypy", "hypothesis", "kubernetes-validate"} == set()
    serve = {Requirement(line).name for line in served_requirements()}
    assert {pin.name for pin in pins_in(SETS[0])} == serve | {
        Requirement(line).name for line in PROJECT["dependencies"]
    }


def served_requirements() -> list[str]:
    """What the extra `serve` brings from the package index."""
    extras, asked, found = PROJECT["optional-dependencies"], ["serve"], []
    while asked:
        for line in extras[asked.pop()]:
            requirement = Requirement(line)
            asked += requirement.extras if requirement.name == PROJECT["name"] else []
            found += [line] if not requirement.name.startswith(PROJECT["name"]) else []
    return found


STAND_IN = """
import os, sys
if sys.argv[1:] == ["config", "list"]:
    print("global.find-links='/wheels /more'", "global.cert='/ca.crt'", "global.no-index='off'", sep="\\n")
    print(":env:.index-url='https://here'", "global.index-url='https://elsewhere'", sep="\\n")
else:
    print("{name}", *sys.argv[1:], os.environ.get("SSL_CERT_FILE"), flush=True)
    sys.exit("{name}" in os.environ["FAILING"].split())
"""


@pytest.mark.parametrize("failing", ["", "uv", "pip", "uv pip"])
def test_set_up_installs_with_uv_as_pip_is_configured_or_with_pip(failing, tmp_path, monkeypatch, capfd):
    for name in ("pip", "uv"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()  # a regular package, which is taken before the real one
        (tmp_path / name / "__main__.py").write_text(STAND_IN.replace("{name}", name))
    for variable, value in {"PYTHONPATH": str(tmp_path), "FAILING": failing, "SSL_CERT_FILE": "/own.crt"}.items():
        monkeypatch.setenv(variable, value)
    assert install.main(["-r", "some.txt"]) == ("pip" in failing)
    first, *lines = capfd.readouterr().out.splitlines()
    assert first == f"pip install --disable-pip-version-check --quiet {install.UV} /own.crt"
    if "pip" not in failing:
        words = lines.pop(0).split()
        assert words[:3] == ["uv", "pip", "install"] and words[-3:] == ["-r", "some.txt", "/ca.crt"]
        assert "--index-url https://here --find-links /wheels --find-links /more -r" in " ".join(words)
    assert lines == (["pip install --disable-pip-version-check -r some.txt /own.crt"] if failing else [])
