"""Copies of compiled folders in a store that writes files only whole: S3 by Mountpoint, or a plain folder.

No rename, lock or append: files are written in order, the manifest last; without it a set does not count. It lists the
sources (configuration, weights, SDK) and each file's hash, checked on the way back. Hashes find damage, not malice:
writers of the store decide what its servers run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("tandem.engine")
NAME = "manifest.json"
FORMAT = 1
_BLOCK = 1 << 20


def check_store(store: Path) -> None:
    """Raises ValueError if the store cannot be written. Call it before hours of compiling."""
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"artifacts: {store}: {error.strerror}; is the bucket mounted?") from error
    if not os.access(store, os.W_OK | os.X_OK):
        raise ValueError(f"artifacts: {store} cannot be written to")


def publish(folder: Path, made_from: Mapping[str, Any], store: Path) -> Path | None:
    """Copies a compiled folder to the store; returns the set's folder, or None if it is there. Raises OSError."""
    kept = store / folder.name
    if _manifest(kept, made_from) is not None:
        return None
    kept.mkdir(parents=True, exist_ok=True)
    hashes: dict[str, dict[str, Any]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        digest, size = _copy(file, kept / name)
        hashes[name] = {"sha256": digest, "bytes": size}
    manifest = {"format": FORMAT, "made_from": dict(made_from), "files": hashes}
    with (kept / NAME).open("w", encoding="utf-8") as last:
        last.write(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return kept


def fetch(store: Path, made_from: Mapping[str, Any], into: Path) -> bool:
    """Copies the set named as `into`, without its suffix, into that empty folder.

    Returns False, with the reason in the log, without such a set or if it is damaged.
    """
    kept = store / into.name.partition(".partial-")[0]
    manifest = _manifest(kept, made_from)
    if manifest is None:
        log.warning("%s has no compiled set %s for this configuration, weights and SDK", store, kept.name)
        return False
    for name, noted in manifest["files"].items():
        file = into / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            log.warning("%s names a file outside its folder: %s", kept / NAME, name)
            return False
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            digest, size = _copy(kept / name, file)
        except OSError as error:
            log.warning("a compiled set is damaged: %s", error)
            return False
        if {"sha256": digest, "bytes": size} != noted:
            log.warning("a compiled set is damaged: %s is not the file that %s names", kept / name, NAME)
            return False
    return True


def _manifest(kept: Path, made_from: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        read = json.loads((kept / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wanted = json.loads(json.dumps(dict(made_from)))
    if not isinstance(read, dict) or (read.get("format"), read.get("made_from")) != (FORMAT, wanted):
        return None
    return read if isinstance(read.get("files"), dict) else None


def _copy(source: Path, target: Path) -> tuple[str, int]:
    """Writes a file once, start to end; returns its hash and size."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as read, target.open("wb") as written:
        while block := read.read(_BLOCK):
            digest.update(block)
            size += len(block)
            written.write(block)
    return digest.hexdigest(), size
