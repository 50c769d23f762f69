"""A disk cache of files that are executed or determine output: owned by this user or root, unchanged by hash."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger("tandem.engine")
NOTE = "hashes.json"
REMEMBERED_BYTES = 1 << 24  # smaller files are faster to hash than to look up
SETTLED_SECONDS = 2.0  # two writes within one tick of the file system's clock leave the same timestamps
_BLOCK = 1 << 22
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(OSError):
    """Another user could have written a file or folder."""


def cache_root() -> Path:
    """Returns $TANDEM_CACHE, or tandem/ in the user's cache folder. Raises ValueError."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("TANDEM_CACHE") or f"{base}/tandem").expanduser()
    except RuntimeError:  # no HOME, and a user without an account, as in containers
        return _temporary_root()


def _temporary_root() -> Path:
    try:
        path = Path(tempfile.gettempdir(), f"tandem-{os.geteuid()}")
        path.mkdir(mode=0o700, exist_ok=True)
        _check_ours(path)
    except OSError as error:
        raise ValueError(f"TANDEM_CACHE: name a folder for caches in it, since there is no HOME: {error}") from None
    return path


def private_folder(path: Path) -> Path:
    """Creates `path`, or a subfolder if root shares it, for this user only. Raises OSError or Untrusted."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid == os.geteuid():
        if status.st_mode & _OTHERS_WRITE:
            log.warning("%s was writable by other users (mode %o); it no longer is", path, stat.S_IMODE(status.st_mode))
            path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
        return path
    if status.st_uid != 0:
        raise Untrusted(f"{path} belongs to another user (uid {status.st_uid}); name another folder in TANDEM_CACHE")
    if status.st_mode & _OTHERS_WRITE:
        return private_folder(path / f"user-{os.geteuid()}")
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file across processes, without following links or writing."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise Untrusted(f"{path} is not a file")
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def seal(note: Path, files: Sequence[Path]) -> None:
    """Records hashes of complete `files` in `note`, above them, and removes others' write permission."""
    for each in {*files, *(file.parent for file in files)}:
        each.chmod(stat.S_IMODE(each.stat().st_mode) & ~_OTHERS_WRITE)
    content = {str(file.relative_to(note.parent)): hash_file(file) for file in sorted(files)}
    write_whole(note, json.dumps(content, indent=1, sort_keys=True) + "\n")


def seal_error(note: Path) -> str | None:
    """Returns why sealed files may not be used, "" without a note, None if they may."""
    try:
        _check_ours(note)
        sealed = json.loads(note.read_text(encoding="utf-8"))
        if not isinstance(sealed, dict) or not sealed:
            return f"{note} is damaged"
        for name, noted in sealed.items():
            file = note.parent / name
            for folder in {file.parent, note.parent}:
                _check_ours(folder)
            _check_ours(file)
            if hash_file(file) != noted:
                return f"{file} was changed: its hash differs from the recorded one"
    except FileNotFoundError as error:
        return "" if error.filename == str(note) else f"{error.filename} is missing"
    except OSError as error:
        return str(error)
    except ValueError:
        return f"{note} is damaged"
    return None


def _check_ours(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise Untrusted(f"{path} is a link")
    if status.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & _OTHERS_WRITE:
        raise Untrusted(f"{path} is writable by other users (mode {stat.S_IMODE(status.st_mode):o})")


def made_once(parent: Path, name: str, what: str, make: Callable[[Path], None]) -> Path:
    """Returns the folder, made if missing or changed. `what`: for logs. Raises OSError."""
    folder = private_folder(parent) / name
    if seal_error(folder / NOTE) is None:
        return folder
    with locked(folder.with_name(f"{folder.name}.lock")):  # servers that start together make it once
        wrong = seal_error(folder / NOTE)
        if wrong:
            log.warning("%s again: %s", what, wrong)
        if wrong is not None:
            log.info("%s once, into %s", what, folder)
            _fill(folder, make)
    return folder


def _fill(folder: Path, make: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name))
    try:
        make(partial)
        seal(partial / NOTE, [file for file in partial.rglob("*") if file.is_file()])
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    number, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def hash_file(file: Path) -> str:
    """Returns SHA-256 of name, size and content, cached for large files. Raises OSError, also if the file changes."""
    with file.open("rb") as stream:
        facts = _facts(stream.fileno())
        note = None
        with contextlib.suppress(OSError):
            if facts[0] >= REMEMBERED_BYTES:
                name = hashlib.sha256(os.path.realpath(file).encode()).hexdigest()
                note = private_folder(cache_root() / "hashes") / f"{name}.json"
        if note and (known := _remembered(note, file, facts)):
            return known
        digest = hashlib.sha256(f"{file.name}:{facts[0]}".encode())
        _read(stream, digest)
        if _facts(stream.fileno()) != facts:
            raise OSError(f"{file} changed while it was read")
    if note and time.time() - max(facts[1], facts[2]) / 1e9 > SETTLED_SECONDS:
        with contextlib.suppress(OSError):
            write_whole(note, json.dumps({"name": file.name, "facts": facts, "sha256": digest.hexdigest()}))
    return digest.hexdigest()


def _remembered(note: Path, file: Path, facts: list[int]) -> str | None:
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
        return str(noted["sha256"]) if (noted["facts"], noted["name"]) == (facts, file.name) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _facts(number: int) -> list[int]:
    # Only root can set ctime back.
    status = os.fstat(number)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _read(stream: BinaryIO, digest: hashlib._Hash) -> None:
    while block := stream.read(_BLOCK):
        digest.update(block)
