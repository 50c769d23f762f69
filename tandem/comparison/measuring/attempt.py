"""Turns errors in a report into remarks; the rest of the report is still made."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def tried(remarks: list[str], what: str, make: Callable[[], T], otherwise: T) -> T:
    """Returns the result of `make`; if it raises, adds a remark beginning with `what` and returns `otherwise`."""
    try:
        return make()
    except Exception as error:
        remarks.append(f"{what} could not be made: {format_error(error)}")
        return otherwise


def format_error(error: BaseException) -> str:
    """Formats an error as 'ValueError: message (file.py:12)'."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
