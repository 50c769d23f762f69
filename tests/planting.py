"""Mistakes planted in functions of ours while a test looks on: the code is swapped where it is, and back again."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any


class PlaceGone(Exception):
    """The text to change is not there once. No AssertionError: a test that expects one must not take this for it."""


def function_at(where: str) -> Any:
    """The function that runs (module:qualified.name); of a property or a context manager, the one it wraps."""
    module, _, name = where.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        try:
            found = inspect.getattr_static(found, part)
        except AttributeError:
            raise PlaceGone(f"adapt the mutant: there is no {where}") from None
    found = found.fget if isinstance(found, property) else found
    return inspect.unwrap(found)


@contextlib.contextmanager
def planted(name: str, where: str, old: str, new: str) -> Iterator[None]:
    """`old` in the function `where` reads `new`, for everybody who holds the function. Raises PlaceGone."""
    function = function_at(where)
    original = function.__code__
    function.__code__ = _mutated(function, name, where, old, new)
    try:
        yield
    finally:
        function.__code__ = original


def _mutated(function: Any, name: str, where: str, old: str, new: str) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise PlaceGone(f"{name}: adapt the mutant, its place stands {source.count(old)} times in {where}")
    (definition,) = ast.parse(source.replace(old, new)).body
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef) or function.__code__.co_freevars:
        raise PlaceGone(f"{name}: adapt the mutant, {where} is no function that can be changed")
    definition.decorator_list = []
    namespace: dict[str, Any] = dict(function.__globals__)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, definition], []), inspect.getfile(function), "exec"), namespace)
    return namespace[definition.name].__code__
