"""Makes a folder of the cache once, whole, for all processes of this user; what was damaged is made again."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tandem.checkpoints.trusted_cache import NOTE, cache_root, locked, private_folder, seal, seal_error

log = logging.getLogger("tandem.engine")


def made_once(name: str, what: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, filled by `make` unless it is there unchanged. `what`: as logs say it.

    Raises OSError if the cache cannot be used.
    """
    folder = private_folder(cache_root()) / name
    if seal_error(folder / NOTE) is None:
        return folder
    with locked(folder.with_name(f"{folder.name}.lock")):  # servers that start together make it once
        wrong = seal_error(folder / NOTE)
        if wrong:
            log.warning("%s again: %s", what, wrong)
        if wrong is not None:
            _fill(folder, what, make)
    return folder


def _fill(folder: Path, what: str, make: Callable[[Path], None]) -> None:
    log.info("%s once, into %s", what, folder)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name))
    try:
        make(partial)
        seal(partial / NOTE, [file for file in partial.rglob("*") if file.is_file()])
        _make_way(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_way(folder: Path) -> None:
    """Deletes whatever is at `folder`: a folder, a file or a link."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
