"""Keeps compiled models in folders named by a hash of configuration, weights and SDK, and copies of them in a store.

`tandem.json` lists a folder's sources. A store may be S3 by Mountpoint, which has no rename, lock or append: files are
written whole, the hashes of all of them last; without those a set does not count. Hashes find damage, not malice:
writers of the store decide what its servers run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.trusted_cache import NOTE, cache_root, hash_file, made_once

log = logging.getLogger("tandem.engine")
MANIFEST = "tandem.json"


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """Compiled code in `root`/`name` and its sources. `store`: where copies may be."""

    root: Path
    name: str
    made_from: Mapping[str, Any]
    store: Path | None = None

    def ensure(self, compile_into: Callable[[Path], None]) -> tuple[Path, bool]:
        """Compiles unless stored, in one process; returns the folder, and whether it compiled. Raises OSError."""
        compiled = False

        def make(partial: Path) -> None:
            nonlocal compiled
            if not self._fetched(partial):
                compile_into(partial)
                compiled = True
            text = json.dumps(dict(self.made_from), indent=2, sort_keys=True)
            (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")

        return made_once(self.root, self.name, f"compiling {self.name}", make), compiled

    def publish(self, folder: Path, store: Path) -> bool:
        """Copies the compiled folder to the store; False if a set is there. Raises OSError."""
        kept = store / self.name
        if _hashes(kept):
            return False
        for name in (*_hashes(folder), NOTE):
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, kept / name)
        return True

    def _fetched(self, partial: Path) -> bool:
        """Fills `partial` from the store; leaves it empty, with the reason in the log, without a whole set."""
        if self.store is None:
            return False
        kept = self.store / self.name
        wrong = _copied(kept, partial) if (kept / NOTE).is_file() else f"{self.store} has no compiled set {self.name}"
        if wrong is None:
            log.info("fetched %s from %s", self.name, self.store)
            return True
        log.warning("%s", wrong)
        shutil.rmtree(partial)
        partial.mkdir(mode=0o700)
        return False


def compiled_model(
    root: str | None, name: str, made_from: Mapping[str, Any], store: str | None = None
) -> CompiledModel:
    """The model compiled from `made_from` under `root` (None: the user's cache)."""
    parent = Path(root).expanduser() if root else cache_root() / "nxdi"
    digest = hashlib.sha256(json.dumps(dict(made_from), sort_keys=True).encode()).hexdigest()[:32]
    return CompiledModel(parent, f"{name}-{digest}", made_from, Path(store).expanduser() if store else None)


def check_store(store: Path) -> None:
    """Raises ValueError if the store cannot be written. Call it before hours of compiling."""
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"artifacts: {store}: {error.strerror}; is the bucket mounted?") from error
    if not os.access(store, os.W_OK | os.X_OK):
        raise ValueError(f"artifacts: {store} cannot be written to")


def _hashes(folder: Path) -> dict[str, str]:
    """Hashes of a folder's files by name; empty if they are not recorded."""
    try:
        read = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _copied(kept: Path, into: Path) -> str | None:
    """Copies a set; returns what is wrong with it, None if nothing is."""
    hashes = _hashes(kept)
    if not hashes:
        return f"a compiled set is damaged: {kept / NOTE}"
    for name, noted in hashes.items():
        file = into / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{kept / NOTE} names a file outside its folder: {name}"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            shutil.copyfile(kept / name, file)
        except OSError as error:
            return f"a compiled set is damaged: {error}"
        if hash_file(file) != noted:
            return f"a compiled set is damaged: {kept / name} is not the file that {NOTE} names"
    return None
