"""Divides a test's parameters between `make test` and `make thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def daily(values: Iterable[Any], *kept: int) -> list[Any]:
    """The parameters at the places `kept` run daily, with `make test`; the others with `make thorough`."""
    return [value if i in kept else _thorough(value) for i, value in enumerate(values)]


def _thorough(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.thorough)
