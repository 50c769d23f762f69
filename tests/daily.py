"""Chooses which combinations of a test's parameters CI runs; the others are marked `wide`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any

import pytest


def daily(values: Iterable[Any], *kept: int) -> list[Any]:
    """Marks the parameters but those at the places `kept` as wide."""
    return [value if i in kept else _wide(value) for i, value in enumerate(values)]


def _wide(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.wide)


def divide(items: Iterable[pytest.Item]) -> None:
    """Marks as wide, of each test marked `each_value`, all combinations but a few that hold each value."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        divided = isinstance(item, pytest.Function) and item.get_closest_marker("each_value")
        if divided and not item.get_closest_marker("thorough"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for combinations in tests.values():
        kept = covering([{(name, id(value)) for name, value in each.callspec.params.items()} for each in combinations])
        for place, item in enumerate(combinations):
            if place not in kept:
                item.add_marker(pytest.mark.wide)


def covering(combinations: Sequence[Set[Hashable]]) -> set[int]:
    """Returns the indices of a few combinations which together hold each value of each parameter."""
    missing = set[Hashable]().union(*combinations)
    kept = set[int]()
    while missing:
        best = max(range(len(combinations)), key=lambda place: len(missing & combinations[place]))
        kept.add(best)
        missing -= combinations[best]
    return kept
