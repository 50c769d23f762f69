"""Finds known errors in a log (`doctor --log FILE`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

LINE_BYTES = 64 * 1024
"""Lines are read in pieces of this size: a log may have no line ends."""
SHOWN = 200


@dataclass(frozen=True, slots=True)
class KnownError:
    """`signs`: a line of a log contains one of them, in lower case. `command`: what to type next.

    `where`: a report's address, or Tandem.
    """

    name: str
    signs: tuple[str, ...]
    symptom: str
    cause: str
    command: str
    where: str


@dataclass(frozen=True, slots=True)
class Found:
    """A known error: its first line and the number of its lines."""

    error: KnownError
    line: int
    text: str
    count: int


@cache
def known_errors() -> tuple[KnownError, ...]:
    rows = json.loads(Path(__file__).with_name("known_errors.json").read_text(encoding="utf-8"))
    return tuple(KnownError(**{**row, "signs": tuple(row["signs"])}) for row in rows)


def errors_in(line: str) -> Iterator[KnownError]:
    lower = line.lower()
    yield from (error for error in known_errors() if any(sign in lower for sign in error.signs))


def read_log(file: Path) -> list[Found]:
    """A log's known errors by first line. Raises ValueError if it cannot be read."""
    found: dict[str, Found] = {}
    try:
        with file.open("rb") as log:
            for number, text in _lines(log):
                for error in errors_in(text):
                    first = found.get(error.name) or Found(error, number, text.strip()[:SHOWN], 0)
                    found[error.name] = Found(error, first.line, first.text, first.count + 1)
    except OSError as error:
        raise ValueError(f"log: {file} cannot be read: {error.strerror or error}") from error
    return list(found.values())


def _lines(log: BinaryIO) -> Iterator[tuple[int, str]]:
    number = 1
    while piece := log.readline(LINE_BYTES):
        yield number, piece.decode("utf-8", errors="replace")
        number += piece.endswith(b"\n")


def found_lines(file: Path, found: list[Found]) -> Iterator[str]:
    """Found errors as a page's lines."""
    if not found:
        yield f"{file}: none of the {len(known_errors())} known errors"
    for one in found:
        more = f" (and {one.count - 1} more)" if one.count > 1 else ""
        yield f"{file}:{one.line}: {one.text}{more}"
        yield f"  cause    {one.error.cause}"
        yield f"  next     {one.error.command}"
        yield f"  reported {one.error.where}"


def run_log(file: Path, as_json: bool = False) -> int:
    """Prints a log's known errors. Returns 0 with any, else 1."""
    found = read_log(file)
    print(json.dumps([asdict(one) for one in found], indent=2) if as_json else "\n".join(found_lines(file, found)))
    return 0 if found else 1
