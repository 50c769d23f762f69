"""What a benchmark measured is in its file, whatever comes after: an error, Ctrl-C, a figure that cannot be made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.comparison.report.attempt import told
from tandem.comparison.report.write import write_atomically


@contextmanager
def kept(path: Path, document: Callable[[], Mapping[str, Any]], raw: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Writes `document` on leaving, and that it is partial where that was by an error or a signal.

    Where the document cannot be made, `raw` is written beside why: the measurements, with nothing made of them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_short: str | None = None
    try:
        yield
    except BaseException as error:
        cut_short = told(error)
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
        made = {**raw(), "partial": cut_short, "remark": f"nothing was made of what was measured: {told(error)}"}
        text = json.dumps(made, indent=1, default=str)
    write_atomically(path, text + "\n")
