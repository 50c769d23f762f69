"""Loads safetensors or a GGUF file into native steps, without torch; notes that steps passed their check."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.checkpoints.family_configs import UnsupportedFamily
from tandem.checkpoints.family_weights import FamilyWeights, FolderWeights, GgufWeights, check_complete
from tandem.checkpoints.generation_config import all_end_ids
from tandem.checkpoints.hub_files import weights_folder
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_unchanged, frequent_tokens, weights_revision
from tandem.checkpoints.scaled_weights import check_dense
from tandem.checkpoints.tensors import Tensors
from tandem.checkpoints.trusted_cache import cache_root, hash_file, made_once, private_folder
from tandem.host.cores import default_threads
from tandem.runners.families import check_fits
from tandem.runners.load_runner import SMALL, WHEN_LOADED
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.compilation import cpu_features, cpu_model, library_path
from tandem.runners.native.library import load_library
from tandem.runners.native.native_runner import NativeRunner, most_tokens
from tandem.runners.native.packed_model import NativeModel, check
from tandem.runners.native.rotary import BY_LENGTH
from tandem.runners.native.steps import Threads
from tandem.runners.native.weights import UNQUANTISED, Packing, packing, quantised
from tandem.runners.protocol import Limits, RunnerIdentity
from tandem.runners.startup import Startup

if TYPE_CHECKING:
    from tandem.runners.load_runner import Execution, Shape

log = logging.getLogger("tandem.engine")
_HERE = Path(__file__).parent


def load_checkpoint(
    checkpoint: Checkpoint, execution: Execution, dtype: str, shape: Shape, verifies: bool, startup: Startup
) -> NativeRunner:
    """Raises CheckpointError or NativeUnavailable."""
    with startup.stage("loading"):
        weights = family_weights(checkpoint)
    with startup.stage("quantising"):
        form = execution.weights
        stored: GgufWeights | Tensors | None = None
        if form in WHEN_LOADED:
            stored = quantised(checkpoint, weights, form)
        elif form == "as-stored" and isinstance(weights, GgufWeights):
            stored = weights
        packed = packing(form, stored)
    config = weights.config
    limits = Limits(
        shape.slots, shape.max_length, shape.max_draft, min(shape.chunk, shape.max_length), config.vocab_size
    )
    identity = RunnerIdentity(
        model_name=checkpoint.name,
        weights_revision=weights_revision(checkpoint),
        dtype=packed.describe(dtype),
        device="cpu",
        backend="native",
        end_of_sequence_ids=all_end_ids(checkpoint, config.eos),
    )
    threads = 1 if config.parameters < SMALL else execution.threads or default_threads()
    only = None if verifies else frequent_tokens(checkpoint, config.vocab_size)
    made = load_native(weights, dtype, threads, limits, identity, verifies, only, packed, execution.recertify, startup)
    check_unchanged(checkpoint, identity.weights_revision)  # else a certificate would be of other weights
    return made


def family_weights(checkpoint: Checkpoint) -> FamilyWeights:
    """Reads a folder or GGUF file. Raises CheckpointError, or NativeUnavailable for other families than Llama."""
    try:
        if checkpoint.gguf_file:
            return GgufWeights(checkpoint.gguf_file)
        folder = weights_folder(checkpoint)
        weights = FolderWeights(folder)
        if not weights.scaled.quantisation:
            check_dense(folder)
        return weights
    except UnsupportedFamily as error:
        raise NativeUnavailable(str(error)) from None
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: {error}") from None


def load_native(
    weights: FamilyWeights,
    dtype: str,
    threads: int,
    limits: Limits,
    identity: RunnerIdentity,
    verifies: bool,
    draft_vocab: Sequence[int] | None,
    packing: Packing = UNQUANTISED,
    recertify: bool | None = None,
    startup: Startup | None = None,
) -> NativeRunner:
    """Compiles the library if necessary and packs weights. Raises NativeUnavailable."""
    check(weights.config, dtype)
    check_fits(weights.config, limits.max_length)
    check_complete(weights)
    startup = startup or Startup()
    with startup.stage("compiling"):
        library = library_path()
    with startup.stage("packing"):
        length = limits.max_length + max(limits.max_draft + 1, limits.chunk)
        pool = Threads(load_library(library), threads)
        cache = limits.slots, length, most_tokens(limits, verifies)
        model = NativeModel(weights, dtype, pool, *cache, draft_vocab, packing, limits.max_length)
        for kind in sorted({rope["rope_type"] for rope in weights.config.ropes} & set(BY_LENGTH)):
            log.info("rotary embedding %s: its frequencies are always those of %d positions", kind, limits.max_length)
    if recertify is None:
        return NativeRunner(model, limits, identity, verifies)
    note = functools.partial(certified, identity, library, threads, limits, recertify)
    return NativeRunner(model, limits, identity, verifies, note)


class _Inexact(Exception):
    pass


def certified(
    identity: RunnerIdentity, library: Path, threads: int, limits: Limits, again: bool, check: Callable[[], bool]
) -> bool:
    """Whether steps give the same bits in every shape: by `check`, or (unless `again`) a note that it passed here."""
    facts = {
        "weights": identity.weights_revision,
        "format": identity.dtype,
        "library": hash_file(library),
        "checks": _sources(),
        "cpu": f"{cpu_model()}: {cpu_features()}",
        "threads": threads,
        "limits": asdict(limits),
    }
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    passed: bool | None = None

    def make(folder: Path) -> None:
        nonlocal passed
        passed = check()
        if not passed:
            raise _Inexact
        (folder / "facts.json").write_text(text)

    try:
        folder = private_folder(cache_root()) / "certificates"
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        if again:
            shutil.rmtree(folder / key, ignore_errors=True)
        made_once(folder, key, f"checking the steps of {identity.model_name}", make)
    except _Inexact:
        return False
    except OSError as error:
        log.warning("cannot keep in %s that the steps of %s passed: %s", cache_root(), identity.model_name, error)
        return check() if passed is None else passed
    if passed is None:
        log.info("%s: its steps passed their check here before; --recertify repeats it", identity.model_name)
    return True


def _sources() -> str:
    folders = (_HERE, _HERE.parents[1] / "checkpoints")
    files = [*(file for each in folders for file in sorted(each.glob("*.py"))), _HERE.parent / "batch_invariance.py"]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
