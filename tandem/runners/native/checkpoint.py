"""Loads a checkpoint into native steps: from safetensors or a GGUF file, without torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.checkpoints.family import UnsupportedFamily
from tandem.checkpoints.family_weights import FamilyWeights, FolderWeights, GgufWeights
from tandem.checkpoints.generation_config import all_end_ids
from tandem.checkpoints.hub_files import weights_folder
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_unchanged, frequent_tokens, weights_revision
from tandem.checkpoints.scaled_weights import check_dense
from tandem.host.cores import default_threads
from tandem.runners.making import SMALL, WHEN_LOADED
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


@dataclass(frozen=True, slots=True)
class Files:
    """A checkpoint's weights. `folder`: where its other files are, None for a GGUF file."""

    checkpoint: Checkpoint
    weights: FamilyWeights
    folder: Path | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Files:
        """Raises CheckpointError, or NativeUnavailable for what is none of the Llama family."""
        try:
            if checkpoint.gguf_file:
                return cls(checkpoint, GgufWeights(checkpoint.gguf_file), None)
            folder = weights_folder(checkpoint)
            return cls(checkpoint, FolderWeights(folder), folder)
        except UnsupportedFamily as error:
            raise NativeUnavailable(str(error)) from None
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: {error}") from None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end a sequence."""
        return all_end_ids(self.checkpoint, self.weights.config.eos)

    @property
    def is_small(self) -> bool:
        """Whether a model is so small that its products are no faster on two threads than on one."""
        return self.weights.config.parameters < SMALL

    def blocks(self, weights: str) -> BlockSource | None:
        """The matrices in blocks that `--weights` asks for, quantised now if they are not in the cache."""
        if weights in WHEN_LOADED:
            return quantised(self.checkpoint, self.weights, weights)
        return self.weights if weights == "as-stored" and isinstance(self.weights, GgufWeights) else None


def load_checkpoint(
    checkpoint: Checkpoint, execution: Execution, dtype: str, shape: Shape, verifies: bool, startup: Startup
) -> NativeRunner:
    """Loads native steps in `dtype`. Raises CheckpointError, or NativeUnavailable."""
    with startup.stage("loading"):
        files = Files.of(checkpoint)
        if files.folder and isinstance(files.weights, FolderWeights) and not files.weights.scaled.quantisation:
            check_dense(files.folder)
    with startup.stage("quantising"):
        packed = packing(execution.weights, files.blocks(execution.weights))
    vocabulary = files.weights.config.vocab_size
    limits = Limits(shape.slots, shape.max_length, shape.max_draft, min(shape.chunk, shape.max_length), vocabulary)
    identity = RunnerIdentity(
        model_name=checkpoint.name,
        weights_revision=weights_revision(checkpoint),
        dtype=packed.describe(dtype),
        device="cpu",
        backend="native",
        end_of_sequence_ids=files.end_ids,
    )
    threads = 1 if files.is_small else execution.threads or default_threads()
    only = None if verifies else frequent_tokens(checkpoint, vocabulary)
    with startup.stage("compiling"), contextlib.suppress(CannotBuild, OSError):  # load_native says why
        library_path()
    with startup.stage("packing"):
        made = load_native(files.weights, dtype, threads, limits, identity, verifies, only, packed, execution.recertify)
        check_unchanged(checkpoint, identity.weights_revision)  # else a certificate would be of other weights
        return made
