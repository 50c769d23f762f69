"""Whatever raises while a report is made becomes a remark; the rest of the report is made all the same."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Attempts:
    """Calls that may fail, and a sentence for each that did."""

    remarks: list[str] = field(default_factory=list)

    def of(self, what: str, make: Callable[[], T], otherwise: T) -> T:
        """What `make` returns, or `otherwise`. `what` begins the sentence."""
        try:
            return make()
        except Exception as error:
            self.remarks.append(f"{what} could not be made: {told(error)}")
            return otherwise


def told(error: BaseException) -> str:
    """'ValueError: its message (file.py:12)', on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
