"""Who may import whom, read from the source: no module is executed here."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = ("main", "compare_architectures", "command_line", "configuration", "flag_row", "flags", "model_flags")

# A package, and which of the others it may import.
MAY_IMPORT = {
    "speculation": set(),
    "models": {"speculation", "planning"},  # planning: whether a device's software is here
    "clients": {"speculation", "models", "tandem"},
    "services": {"speculation", "models", "tandem", "clients"},  # the DraftWorker calls a verifier
    "comparison": {"speculation", "clients", "reporting"},
    "acceptance": {"speculation", "models", "comparison"},
    "draft_training": {"speculation", "models", "acceptance", "comparison"},
    "deploy": {"main", "configuration", "services", "clients", "tandem"},  # starts roles in somebody else's processes
    "planning": set(),  # pure: config.json files, package metadata and small tools; anyone may ask it
    "reporting": set(),  # reads a parsed comparison.json and nothing else
}
OURS = {*MAY_IMPORT, *LAUNCHERS, "tandem", "proto", "benchmarks", "tests"}
WIRE = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "tandem"}
MODEL_LIBRARIES = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate"}
HEAVY = {"torch", "transformers", "accelerate"}


def modules_of(folder: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


PACKAGE_MODULES = [module for package in MAY_IMPORT for module in modules_of(package)]
LAUNCHER_MODULES = [Path(f"{name}.py") for name in LAUNCHERS]


def imports_in(body: ast.AST, module: Path, *, deferred: bool = True) -> Iterator[tuple[str, int]]:
    """Every dotted name that is imported, and its line; without `deferred`, only what importing the module imports."""
    for node in ast.iter_child_nodes(body):
        if not deferred and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if not deferred and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imports_in(ast.Module(node.orelse, []), module, deferred=deferred)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = list(module.parent.parts)
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield source, node.lineno
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno
        yield from imports_in(node, module, deferred=deferred)


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"), filename=str(module))


def imports_of(module: Path, *, deferred: bool = True) -> list[tuple[str, int]]:
    return list(imports_in(tree_of(module), module, deferred=deferred))


def offences(module: Path, forbidden: set[str]) -> list[str]:
    return sorted(
        {f"{module}:{line} imports {name}" for name, line in imports_of(module) if name.split(".")[0] in forbidden}
    )


def file_of(name: str) -> Path | None:
    """The module of ours that a dotted name stands for, if it is one."""
    path = Path(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if (ROOT / candidate).is_file()), None)


@pytest.mark.parametrize("module", PACKAGE_MODULES, ids=str)
def test_a_module_imports_only_the_packages_that_its_own_may_import(module):
    package = module.parts[0]
    assert offences(module, OURS - MAY_IMPORT[package] - {package}) == []


@pytest.mark.parametrize("module", modules_of("speculation"), ids=str)
def test_the_algorithm_knows_neither_the_wire_nor_a_model_library(module):
    assert offences(module, WIRE | MODEL_LIBRARIES) == []


@pytest.mark.parametrize(
    "module",
    [module for name in ("models", "comparison", "reporting") for module in modules_of(name)] + LAUNCHER_MODULES,
    ids=str,
)
def test_only_services_and_clients_import_grpc(module):
    assert offences(module, WIRE) == []


@pytest.mark.parametrize("launcher", LAUNCHER_MODULES, ids=str)
def test_a_launcher_answers_help_without_loading_a_model_library(launcher):
    heavy, seen, queue = [], {launcher}, [launcher]
    while queue:
        module = queue.pop()
        for name, line in imports_of(module, deferred=False):
            if name.split(".")[0] in HEAVY:
                heavy.append(f"{module}:{line} imports {name}")
            parents = (name.rsplit(".", dots)[0] for dots in range(name.count(".") + 1))
            for found in map(file_of, parents):
                if found is not None and found not in seen:
                    seen.add(found)
                    queue.append(found)
    assert sorted(set(heavy)) == []


def test_one_file_imports_nxd_inference():
    importers = {
        str(module)
        for module in PACKAGE_MODULES
        if any(name.split(".")[0].startswith("neuronx_distributed") for name, _ in imports_of(module))
    }
    assert importers == {"tandem/runners/nxdi/sdk.py"}


def test_the_rules_see_every_package_on_disk():
    on_disk = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert on_disk - {"tests", "benchmarks"} == set(MAY_IMPORT)
    assert all(modules_of(package) for package in MAY_IMPORT)


def test_a_planted_import_is_seen_wherever_it_hides():
    hiding = """
import grpc.aio
from tandem.runners import protocol
from ..services import session
if TYPE_CHECKING:
    import torch
def later():
    import tandem.rpc.channel
    importlib.import_module("tandem.comparison.report.files")
"""
    module, tree = Path("speculation/drafters/ngram.py"), ast.parse(hiding)
    everywhere = {name for name, _ in imports_in(tree, module)}
    assert everywhere >= {
        "grpc.aio",
        "tandem.runners.protocol",
        "torch",
        "tandem.rpc.channel",
        "tandem.comparison.report.files",
    }
    assert "speculation.services.session" in everywhere  # relative: still inside speculation
    at_import = {name for name, _ in imports_in(tree, module, deferred=False)}
    assert at_import == {
        "grpc.aio",
        "models",
        "tandem.runners.protocol",
        "speculation.services",
        "speculation.services.session",
    }


def test_the_contract_is_not_importable():
    assert [str(path.relative_to(ROOT)) for path in (ROOT / "proto").rglob("*.py*")] == []
    spec = importlib.util.find_spec("proto")  # google's proto-plus is imported by this name, and must stay so
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT / "proto")


def test_structure_md_names_every_module_and_no_other():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    folders = "|".join([*MAY_IMPORT, "benchmarks"])
    named = set(re.findall(rf"(?<![\w/])(?:(?:{folders})/[\w/]+|{'|'.join(LAUNCHERS)})\.py\b", text))
    modules = [*PACKAGE_MODULES, *modules_of("benchmarks"), *LAUNCHER_MODULES]
    on_disk = {module.as_posix() for module in modules if module.name != "__init__.py"}
    assert named - {path for path in named if path.endswith("/__init__.py")} == on_disk
