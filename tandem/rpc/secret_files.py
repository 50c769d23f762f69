"""Reads key and token files, checks permissions, reads changed files again."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from tandem.speculation.errors import InvalidField

log = logging.getLogger("tandem.security")

Value = TypeVar("Value")


def check_readable(flag: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise InvalidField(flag, f"{file}: {error.strerror}") from None


def warn_if_others_read(flag: str, file: str) -> None:
    mode = stat.S_IMODE(os.stat(file).st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s: %s can be read by others (mode %o); chmod 600 is enough", flag, file, mode)


class Reread(Generic[Value]):
    """A value read from files, and again when they change; unusable files keep the value and are logged once."""

    def __init__(self, read: Callable[[], Value], *files: str) -> None:
        self._read, self._files = read, files
        self._signature = self._now()
        self.value = read()

    def _now(self) -> tuple[tuple[int, int, int], ...]:
        try:
            found = [os.stat(file) for file in self._files]
        except OSError:
            return ()
        return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)

    def changed(self) -> bool:
        """Whether the value is a new one."""
        now = self._now()
        if now == self._signature:
            return False
        self._signature = now
        try:
            self.value = self._read()
        except (OSError, ValueError) as error:
            log.error("cannot use the new %s, keeping the old one: %s", self._files[0], error)
            return False
        log.info("reloaded: %s", self._files[0])
        return True


def lines_of(flag: str, file: str) -> Sequence[tuple[int, str]]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(flag, f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]
