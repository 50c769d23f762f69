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
    """Lower-case log lines have one of `signs`. `command`: to type next. `where`: a report's address, or Tandem."""

    name: str
    signs: tuple[str, ...]
    symptom: str
    cause: str
    command: str
    where: str


@cache
def known_errors() -> tuple[KnownError, ...]:
    rows = json.loads(Path(__file__).with_name("known_errors.json").read_text(encoding="utf-8"))
    return tuple(KnownError(**{**row, "signs": tuple(row["signs"])}) for row in rows)


def errors_in(line: str) -> Iterator[KnownError]:
    lower = line.lower()
    yield from (error for error in known_errors() if any(sign in lower for sign in error.signs))


def read_log(file: Path) -> Iterator[tuple[int, str, KnownError]]:
    """The first line of each known error in a log, its number and the error. Raises ValueError for unreadable logs."""
    seen: set[str] = set()
    try:
        with file.open("rb") as log:
            for number, text in _lines(log):
                for error in errors_in(text):
                    if error.name not in seen:
                        yield number, text.strip()[:SHOWN], error
                    seen.add(error.name)
    except OSError as error:
        raise ValueError(f"log: {file} cannot be read: {error.strerror or error}") from error


def _lines(log: BinaryIO) -> Iterator[tuple[int, str]]:
    number = 1
    while piece := log.readline(LINE_BYTES):
        yield number, piece.decode("utf-8", errors="replace")
        number += piece.endswith(b"\n")


def run_log(file: Path, as_json: bool = False) -> int:
    """Prints a log's known errors. Returns 0 with any, else 1."""
    found = list(read_log(file))
    if as_json:
        print(json.dumps([{"line": line, "text": text, "error": asdict(e)} for line, text, e in found], indent=2))
    elif not found:
        print(f"{file}: none of the {len(known_errors())} known errors")
    else:
        for line, text, error in found:
            print(f"{file}:{line}: {text}\n  cause    {error.cause}\n  next     {error.command}")
            print(f"  reported {error.where}")
    return 0 if found else 1
