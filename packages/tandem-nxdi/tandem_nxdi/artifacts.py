"""Keeps compiled models in folders named by a hash of configuration, weights and SDK.

`tandem.json` lists a folder's sources and is written last: without it, a compilation was interrupted. Compiling takes
minutes per bucket; folders can be copied between machines.
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

from tandem.checkpoints.trusted_cache import NOTE, cache_root, locked, seal, seal_error
from tandem_nxdi.store import fetch

log = logging.getLogger("tandem.engine")
MANIFEST = "tandem.json"
MODEL, CONFIG = "model.pt", "neuron_config.json"  # what NxDI's compile() writes (application_base.py)


@dataclass(frozen=True, slots=True)
class CompiledFolder:
    """Compiled code and its required sources. `store`: where copies may be."""

    folder: Path
    made_from: Mapping[str, Any]
    store: Path | None = None

    @property
    def ready(self) -> bool:
        """Whether it is complete, unchanged, and compiled from `made_from`."""
        try:
            noted = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        if noted != json.loads(json.dumps(dict(self.made_from))):
            return False
        wrong = seal_error(self.folder / NOTE)
        if wrong:
            log.warning("ignoring a compiled folder: %s", wrong)
        return wrong is None and (self.folder / MODEL).is_file() and (self.folder / CONFIG).is_file()


def compiled(root: str | None, name: str, made_from: Mapping[str, Any], store: str | None = None) -> CompiledFolder:
    """The folder for `made_from` under `root` (None: the user's cache)."""
    parent = Path(root).expanduser() if root else cache_root() / "nxdi"
    text = json.dumps(dict(made_from), sort_keys=True)
    kept = Path(store).expanduser() if store else None
    return CompiledFolder(parent / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}", made_from, kept)


def ensure(wanted: CompiledFolder, compile_into: Callable[[Path], None]) -> bool:
    """Compiles unless the folder is ready or in the store; returns whether it did. Processes compile once."""
    if wanted.ready:
        return False
    wanted.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(wanted.folder.with_suffix(".lock")):
        if wanted.ready:
            return False
        partial = wanted.folder.with_name(f"{wanted.folder.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        try:
            fetched = wanted.store is not None and _fetched(wanted, wanted.store, partial)
            if not fetched:
                compile_into(partial)
            text = json.dumps(dict(wanted.made_from), indent=2, sort_keys=True)
            (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")
            seal(partial / NOTE, [file for file in partial.rglob("*") if file.is_file()])
            shutil.rmtree(wanted.folder, ignore_errors=True)
            partial.rename(wanted.folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return not fetched


def _fetched(wanted: CompiledFolder, store: Path, partial: Path) -> bool:
    """Fills `partial` from the store; leaves it empty without such a set."""
    if fetch(store, wanted.made_from, partial):
        for note in (MANIFEST, NOTE):  # made anew, by and for this machine
            (partial / note).unlink(missing_ok=True)
        log.info("fetched %s from %s", wanted.folder.name, store)
        return True
    shutil.rmtree(partial)
    partial.mkdir(mode=0o700)
    return False
