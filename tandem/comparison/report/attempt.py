"""Turns errors while a report is made into remarks, so that the rest of the report is still made."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Attempts:
    """Makes calls that may fail and keeps a sentence for each failure."""

    remarks: list[str] = field(default_factory=list)

    def of(self, what: str, make: Callable[[], T], otherwise: T) -> T:
        """Returns the result of `make`, or `otherwise` if it raises. The sentence begins with `what`."""
        try:
            return make()
        except Exception as error:
            self.remarks.append(f"{what} could not be made: {format_error(error)}")
            return otherwise


def format_error(error: BaseException) -> str:
    """Formats an error on one line: 'ValueError: its message (file.py:12)'."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
