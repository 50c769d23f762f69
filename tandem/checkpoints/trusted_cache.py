"""Manages cache folders, and checks that nobody else could have changed their files.

Cached files are executed, or determine a model's output. A file is used only if this user or root owns it, nobody else
may write it, and its hash is the one recorded when it was made; otherwise it is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.checkpoints.file_hashes import FileHashes, write_whole

log = logging.getLogger("tandem.engine")
NOTE = "hashes.json"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(OSError):
    """Another user could have written a file or folder; the message says which and how."""


def cache_root() -> Path:
    """The cache folder: $TANDEM_CACHE, or tandem/ in the user's cache folder. Raises ValueError if there is none."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("TANDEM_CACHE") or f"{base}/tandem").expanduser()
    except RuntimeError:  # no HOME, and a user without an account, as in containers
        return _temporary_root()


def _temporary_root() -> Path:
    """This user's folder of the temporary directory. Raises ValueError if it may be another user's."""
    try:
        path = Path(tempfile.gettempdir(), f"tandem-{os.geteuid()}")
        path.mkdir(mode=0o700, exist_ok=True)
        _check_ours(path)
    except OSError as error:
        raise ValueError(f"TANDEM_CACHE: name a folder for caches in it, since there is no HOME: {error}") from None
    return path


def file_hashes() -> FileHashes:
    """Hashes remembered in the user's cache, or not remembered if that cannot be used."""
    try:
        return FileHashes(private_folder(cache_root() / "hashes"))
    except OSError:
        return FileHashes(None)


def private_folder(path: Path) -> Path:
    """Creates a folder that nobody else may write to and returns it: `path`, or a subfolder of it for this user.

    A subfolder is used if `path` is root's and shared. If `path` is ours, write permission of others is removed. Raises
    OSError, or Untrusted if the folder belongs to another user.
    """
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
    """Holds a lock file, so that one process at a time runs the block. Does not follow links or write to the file."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise Untrusted(f"{path} is not a file")
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def seal(note: Path, files: Sequence[Path]) -> None:
    """Records the hashes of `files` in `note`; the files are complete and in the note's folder or below it.

    Also removes write permission of others from the files and their folders.
    """
    for each in {*files, *(file.parent for file in files)}:
        each.chmod(stat.S_IMODE(each.stat().st_mode) & ~_OTHERS_WRITE)
    hashes = file_hashes()
    content = {str(file.relative_to(note.parent)): hashes.of(file) for file in sorted(files)}
    write_whole(note, json.dumps(content, indent=1, sort_keys=True) + "\n")


def seal_error(note: Path) -> str | None:
    """Why the files sealed by `note` may not be used, in one line; None if they may; "" if there is no note yet."""
    try:
        _check_ours(note)
        sealed = json.loads(note.read_text(encoding="utf-8"))
        if not isinstance(sealed, dict) or not sealed:
            return f"{note} is damaged"
        hashes = file_hashes()
        for name, noted in sealed.items():
            file = note.parent / name
            for folder in {file.parent, note.parent}:
                _check_ours(folder)
            _check_ours(file)
            if hashes.of(file) != noted:
                return f"{file} was changed: its hash differs from the recorded one"
    except FileNotFoundError as error:
        return "" if error.filename == str(note) else f"{error.filename} is missing"
    except OSError as error:
        return str(error)
    except ValueError:
        return f"{note} is damaged"
    return None


def _check_ours(path: Path) -> None:
    """Raises Untrusted if `path` is a link, belongs to another user, or may be written by others."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise Untrusted(f"{path} is a link")
    if status.st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & _OTHERS_WRITE:
        raise Untrusted(f"{path} is writable by other users (mode {stat.S_IMODE(status.st_mode):o})")
