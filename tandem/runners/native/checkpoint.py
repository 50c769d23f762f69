"""Loads safetensors or a GGUF file into native steps, without torch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tandem.checkpoints.family import UnsupportedFamily
from tandem.checkpoints.family_weights import FamilyWeights, FolderWeights, GgufWeights
from tandem.checkpoints.generation_config import all_end_ids
from tandem.checkpoints.hub_files import weights_folder
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_unchanged, frequent_tokens, weights_revision
from tandem.checkpoints.scaled_weights import check_dense
from tandem.host.cores import default_threads
from tandem.runners.loading import SMALL, WHEN_LOADED
from tandem.runners.native import NativeUnavailable
from tandem.runners.native.build import CannotBuild, library_path
from tandem.runners.native.load import load_native
from tandem.runners.native.quantised_cache import quantised
from tandem.runners.native.weights import BlockSource, packing
from tandem.runners.protocol import Limits, RunnerIdentity

if TYPE_CHECKING:
    from tandem.runners.loading import Execution, Shape
    from tandem.runners.native.runner import NativeRunner
    from tandem.runners.startup import Startup


def load_checkpoint(
    checkpoint: Checkpoint, execution: Execution, dtype: str, shape: Shape, verifies: bool, startup: Startup
) -> NativeRunner:
    with startup.stage("loading"):
        weights = family_weights(checkpoint)
    with startup.stage("quantising"):
        packed = packing(execution.weights, _blocks(checkpoint, weights, execution.weights))
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
    with startup.stage("compiling"), contextlib.suppress(CannotBuild, OSError):  # load_native says why
        library_path()
    with startup.stage("packing"):
        made = load_native(weights, dtype, threads, limits, identity, verifies, only, packed, execution.recertify)
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


def _blocks(checkpoint: Checkpoint, weights: FamilyWeights, form: str) -> BlockSource | None:
    if form in WHEN_LOADED:
        return quantised(checkpoint, weights, form)
    return weights if form == "as-stored" and isinstance(weights, GgufWeights) else None
