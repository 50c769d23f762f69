"""Saves a benchmark's measurements, even after an error or Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.comparison.measuring.attempt import format_error
from tandem.comparison.report.publish import write_atomically


@contextmanager
def kept(path: Path, document: Callable[[], Mapping[str, Any]], raw: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Writes `document` on exit, marked partial after an error; if it cannot be built, writes the error and `raw`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_short: str | None = None
    try:
        yield
    except BaseException as error:
        cut_short = format_error(error)
        raise
    finally:
        _write(path, document, raw, cut_short)


def _write(
    path: Path,
    document: Callable[[], Mapping[str, Any]],
    raw: Callable[[], Mapping[str, Any]],
    cut_short: str | None,
) -> None:
    try:
        made = {**document(), "partial": cut_short}
        text = json.dumps(made, indent=1, default=str)
    except Exception as error:
        made = {
            **raw(),
            "partial": cut_short,
            "remark": f"nothing was made of what was measured: {format_error(error)}",
        }
        text = json.dumps(made, indent=1, default=str)
    write_atomically(path, text + "\n")
