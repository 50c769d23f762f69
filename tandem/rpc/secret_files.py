"""Reads key and token files, checks permissions, detects changes."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from tandem.speculation.errors import InvalidField

log = logging.getLogger("tandem.security")

Signature = tuple[tuple[int, int, int], ...]


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


def signature(*files: str) -> Signature:
    """Returns inode, size and modification time per file. Raises OSError."""
    found = [os.stat(file) for file in files]
    return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)


def lines_of(flag: str, file: str) -> Sequence[tuple[int, str]]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(flag, f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in numbered if line and not line.startswith("#")]
