"""Checks which rooms of tandem/ may import which, by reading the source without running any module."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = (Path("main.py"), Path("compare_architectures.py"))

# Each room of tandem/, and the other rooms that it may import.
MAY_IMPORT = {
    "v1": set(),
    "speculation": set(),
    "host": set(),  # reads package metadata and runs small tools; any room may use it
    "checkpoints": {"speculation"},
    "engine": {"speculation", "runners", "checkpoints", "host"},
    "runners": {"speculation", "checkpoints", "host"},  # host: whether a device's software is installed
    "rpc": {"speculation", "v1"},
    "receipts": {"speculation", "engine", "checkpoints", "runners"},
    "clients": {"speculation", "engine", "rpc", "checkpoints", "runners", "v1"},
    "services": {"speculation", "engine", "rpc", "checkpoints", "runners", "clients", "receipts", "v1"},
    "comparison": {"speculation", "clients", "rpc", "host", "workshops", "cli"},  # cli: how an option is declared
    "cli": {
        "speculation",
        "engine",
        "rpc",
        "checkpoints",
        "runners",
        "clients",
        "services",
        "comparison",
        "host",
        "receipts",
        "workshops",
    },
    "vllm": {"speculation", "rpc", "checkpoints", "clients"},  # clients: the event loop in a thread alone
    "workshops": {"rpc", "checkpoints", "runners", "host", "cli", "v1"},
}
TOPS = ("services", "clients", "workshops")
WIRE = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "tandem.v1"}
MODEL_LIBRARIES = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate"}


def modules_of(room: str) -> list[Path]:
    """Paths of a room's modules as they are imported: tandem/services/x.py, although the file is services/x.py."""
    folder = ROOT / (room if room in TOPS else f"tandem/{room}")
    return sorted(Path("tandem", room, path.relative_to(folder)) for path in folder.rglob("*.py"))


DISTRIBUTIONS = ("tandem_nxdi", "tandem_train")
"""Links at the top to packages of their own, in packages/."""
DISTRIBUTED = sorted(path.relative_to(ROOT) for name in DISTRIBUTIONS for path in (ROOT / name).glob("**/*.py"))
PACKAGE_MODULES = [module for room in MAY_IMPORT for module in modules_of(room)]


def _name(node: ast.expr) -> str | None:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def imports_in(body: ast.AST, module: Path) -> Iterator[tuple[str, int]]:
    """Yields each imported dotted name with its line."""
    left = [*ast.iter_child_nodes(body)]
    while left:
        node = left.pop()
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = list(module.parent.parts)
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield source, node.lineno
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno


@cache
def tree_of(module: Path) -> ast.Module:
    """Parses a module. Garbage collection, which took most of the time, is off meanwhile and skips the tree later."""
    gc.disable()
    try:
        return ast.parse((ROOT / module).read_text(encoding="utf-8"), filename=str(module))
    finally:
        gc.freeze()
        gc.enable()


@cache
def imports_of(module: Path) -> list[tuple[str, int]]:
    return list(imports_in(tree_of(module), module))


def offences(modules: Iterable[Path], forbidden: set[str]) -> list[str]:
    return sorted(
        {
            f"{module}:{line} imports {name}"
            for module in modules
            for name, line in imports_of(module)
            if any(name == one or name.startswith(f"{one}.") for one in forbidden)
        }
    )


def test_the_comparison_measures_then_analyses_then_reports():
    rooms = ("links", "measuring", "analysis", "report")
    for place, room in enumerate(rooms):
        above = {f"tandem.comparison.{name}" for name in rooms[place + 1 :]}
        assert offences(modules_of(f"comparison/{room}"), above) == []


def test_a_module_imports_only_the_rooms_that_its_own_may_import():
    found = []
    for room, may in MAY_IMPORT.items():
        found += offences(modules_of(room), {f"tandem.{other}" for other in set(MAY_IMPORT) - may - {room}})
    assert found == []


def test_nothing_of_ours_is_imported_under_a_second_name():
    assert offences(PACKAGE_MODULES, {*TOPS, "main", "compare_architectures", "tests", "benchmarks", "proto"}) == []


@pytest.mark.parametrize("top", TOPS)
def test_a_folder_at_the_top_cannot_be_imported_under_its_own_name(top):
    code = f"import tandem.{top}\ntry:\n    import {top}\nexcept ImportError as error:\n    print(error)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == f"this package is imported as tandem.{top}\n", run.stderr


def test_the_algorithm_knows_neither_the_wire_nor_a_model_library():
    assert offences(modules_of("speculation"), WIRE | MODEL_LIBRARIES) == []


def test_only_services_clients_and_rpc_import_grpc():
    rooms = ("engine", "runners", "checkpoints", "comparison", "host", "cli")
    workshops = [module for module in modules_of("workshops") if "ray_serve" not in module.parts]
    assert offences([*workshops, *(module for room in rooms for module in modules_of(room))], WIRE) == []


def test_workshops_and_further_distributions_are_imported_by_the_command_line_alone():
    """But the comparison, which asks where a pair fits. One place names a backend that a configuration asks for."""
    modules = [module for module in PACKAGE_MODULES if not str(module).startswith("tandem/cli/")]
    assert offences(modules, set(DISTRIBUTIONS)) == []
    may = ("tandem/workshops/", "tandem/comparison/")
    assert offences([each for each in modules if not str(each).startswith(may)], {"tandem.workshops"}) == []
    naming = {
        str(module)
        for module in modules
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tandem_nxdi.")
    }
    assert naming == {"tandem/runners/backends.py"}
    assert offences(DISTRIBUTED, {"tandem.clients", "tandem.services", *WIRE}) == []


def test_one_module_imports_nxd_inference():
    importers = {
        str(module)
        for module in (*PACKAGE_MODULES, *DISTRIBUTED)
        if any(name.split(".")[0].startswith("neuronx_distributed") for name, _ in imports_of(module))
    }
    assert importers == {"tandem_nxdi/sdk.py"}


def test_the_rules_see_every_room_on_disk():
    on_disk = {path.parent.name for path in (ROOT / "tandem").glob("*/__init__.py")} | {"v1"}
    assert on_disk == set(MAY_IMPORT)
    assert all(modules_of(room) for room in MAY_IMPORT)
