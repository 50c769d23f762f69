"""Divides a test's parameters between `make test` and `make thorough`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any

import pytest


def daily(values: Iterable[Any], *kept: int) -> list[Any]:
    """The parameters at the places `kept` run daily, with `make test`; the others with `make thorough`."""
    return [value if i in kept else _thorough(value) for i, value in enumerate(values)]


def _thorough(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.thorough)


def divide(items: Iterable[pytest.Item]) -> None:
    """Of each test with the mark `each_value`: as few combinations run daily as hold each value of each parameter."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        divided = isinstance(item, pytest.Function) and item.get_closest_marker("each_value")
        if divided and not item.get_closest_marker("thorough"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for combinations in tests.values():
        kept = covering([{(name, id(value)) for name, value in each.callspec.params.items()} for each in combinations])
        for place, item in enumerate(combinations):
            if place not in kept:
                item.add_marker(pytest.mark.thorough)


def covering(combinations: Sequence[Set[Hashable]]) -> set[int]:
    """Returns the indices of a few combinations which together hold each value of each parameter."""
    missing = set[Hashable]().union(*combinations)
    kept = set[int]()
    while missing:
        best = max(range(len(combinations)), key=lambda place: len(missing & combinations[place]))
        kept.add(best)
        missing -= combinations[best]
    return kept
