"""Notes that a model's steps passed their check, so that later starts on this CPU skip it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tandem.checkpoints.trusted_cache import cache_root, hash_file, private_folder, seal, seal_error, write_whole
from tandem.runners.native.build import cpu_features, cpu_model
from tandem.runners.protocol import Limits, RunnerIdentity

log = logging.getLogger("tandem.engine")
_HERE = Path(__file__).parent


class Certificate:
    """A note in the cache. `holds`: an earlier start wrote it for these `facts`; `again` ignores it."""

    def __init__(self, name: str, facts: Mapping[str, object], again: bool = False) -> None:
        self._name, self._text = name, json.dumps(facts, indent=1, sort_keys=True) + "\n"
        self._key = hashlib.sha256(self._text.encode()).hexdigest()[:32]
        self.holds = not again and self._is_kept()

    def keep(self) -> None:
        if self.holds:
            return
        try:
            folder = private_folder(cache_root() / "certificates")
            file = folder / f"{self._key}.json"
            write_whole(file, self._text)
            seal(file.with_suffix(".seal"), [file])
        except OSError as error:
            log.warning("cannot keep in %s that the steps of %s passed: %s", cache_root(), self._name, error)

    def _is_kept(self) -> bool:
        try:
            file = private_folder(cache_root() / "certificates") / f"{self._key}.json"
            if wrong := seal_error(file.with_suffix(".seal")):
                log.warning("checking the steps of %s again: %s", self._name, wrong)
            if wrong is not None:
                return False
            passed = time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))
        except OSError:
            return False
        log.info("%s: its steps passed their check here on %s; --recertify repeats it", self._name, passed)
        return True


def certificate(
    identity: RunnerIdentity,
    library: Path,
    threads: int,
    limits: Limits,
    verifies: bool,
    draft_vocab: Sequence[int] | None,
    again: bool,
) -> Certificate:
    """The certificate for weights, format, CPU, library, threads and sizes."""
    facts = {
        "weights": identity.weights_revision,
        "format": identity.dtype,
        "library": hash_file(library),
        "checks": _sources(),
        "numpy": np.__version__,
        "cpu": f"{cpu_model()}: {cpu_features()}",
        "threads": threads,
        "limits": asdict(limits),
        "verifies": verifies,
        "draft_vocab": None if draft_vocab is None else hashlib.sha256(str(list(draft_vocab)).encode()).hexdigest(),
    }
    return Certificate(identity.model_name, facts, again)


def _sources() -> str:
    folders = (_HERE, _HERE.parents[1] / "checkpoints")
    files = [*(file for each in folders for file in sorted(each.glob("*.py"))), _HERE.parent / "batch_invariance.py"]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
