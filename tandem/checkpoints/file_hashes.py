"""Computes and remembers SHA-256 hashes of files; a large file is read again only after it has changed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path

log = logging.getLogger("tandem.engine")

_BLOCK = 1 << 22
REMEMBERED_BYTES = 1 << 24  # smaller files are faster to hash than to look up
SETTLED_SECONDS = 2.0  # two writes within one tick of the file system's clock leave the same timestamps
PROGRESS_SECONDS = 5.0

Facts = list[int]


class FileHashes:
    """Hashes files; remembers hashes in `folder`, which no other user may write to. None: remembers nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def of(self, file: Path) -> str:
        """The hash of a file's name, size and content. Raises OSError, also if the file changes meanwhile."""
        with file.open("rb") as stream:
            facts = _facts(stream.fileno())
            remembered = self._remembered(file, facts)
            if remembered:
                return remembered
            digest = hashlib.sha256(f"{file.name}:{facts[0]}".encode())
            _read(stream.fileno(), file, facts[0], digest)
            if _facts(stream.fileno()) != facts:
                raise OSError(f"{file} changed while it was read")
        self._remember(file, facts, digest.hexdigest())
        return digest.hexdigest()

    def _place(self, file: Path) -> Path | None:
        name = hashlib.sha256(os.path.realpath(file).encode()).hexdigest()
        return self._folder / f"{name}.json" if self._folder else None

    def _remembered(self, file: Path, facts: Facts) -> str | None:
        place = self._place(file) if facts[0] >= REMEMBERED_BYTES else None
        if place is None:
            return None
        try:
            noted = json.loads(place.read_text(encoding="utf-8"))
            return str(noted["sha256"]) if noted["facts"] == facts and noted["name"] == file.name else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _remember(self, file: Path, facts: Facts, digest: str) -> None:
        place = self._place(file)
        settled = time.time() - max(facts[1], facts[2]) / 1e9 > SETTLED_SECONDS
        if place is None or facts[0] < REMEMBERED_BYTES or not settled:
            return
        try:
            note = {"path": str(file), "name": file.name, "facts": facts, "sha256": digest}
            write_whole(place, json.dumps(note))
        except OSError as error:
            log.debug("cannot cache the hash of %s: %s", file, error)


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: it has either all of `text` or its previous content."""
    number, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _facts(number: int) -> Facts:
    """Size, timestamps, inode and device. Only root can set the change time (ctime) back."""
    status = os.fstat(number)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _read(number: int, file: Path, size: int, digest: hashlib._Hash) -> None:
    block, done, said = bytearray(_BLOCK), 0, time.monotonic()
    view = memoryview(block)
    while count := os.readv(number, [block]):
        digest.update(view[:count])
        done += count
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            log.info("hashing %s: %.1f of %.1f GB", file.name, done / 1e9, size / 1e9)
