"""Loads a checkpoint's module, and says what `auto` means for a quantised checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.gguf_blocks import StoredWeights
from tandem.checkpoints.hub_files import configuration_folder, read_configuration, weights_folder
from tandem.checkpoints.locate import Checkpoint, CheckpointError, first_line
from tandem.checkpoints.quantisation import INT8, quantisation_of
from tandem.checkpoints.scaled_weights import ScaledWeights, check_dense
from tandem.runners.torch.tensor_parallel import sharding

if TYPE_CHECKING:
    from tandem.runners.loading import Execution
    from tandem.runners.torch.platforms import Platform

WHEN_LOADED = ("int8", "q4")
"""Values of --weights that quantise dense matrices."""
SMALL = 50_000_000  # parameters; a smaller model's products are no faster on two threads than on one
QUANTISED = (*WHEN_LOADED, "as-stored")


def in_own_format(execution: Execution, checkpoint: Checkpoint, order: Sequence[str]) -> Execution:
    """`execution`, where weights that are `auto` are those of the checkpoint if native steps can run it.

    A GGUF file in blocks runs as stored unless a dtype is given, an int8 checkpoint in int8. Raises CheckpointError.
    """
    if execution.weights != "auto" or execution.dtype == "float16" or execution.tp_degree > 1 or "native" not in order:
        return execution
    if (file := checkpoint.gguf_file) and execution.dtype == "auto" and StoredWeights(file).runs_as_stored:
        return replace(execution, weights="as-stored")
    schemes = None if checkpoint.gguf else quantisation_of(configuration_folder(checkpoint))
    is_int8 = schemes is not None and all(scheme.numbers == INT8 for scheme in schemes)
    return replace(execution, weights="int8") if is_int8 else execution


def load_model(checkpoint: Checkpoint, dtype: Any, platform: Platform, ranks: int) -> Any:
    """A module. Raises CheckpointError."""
    try:
        return _load(checkpoint, dtype, platform, ranks)
    except CheckpointError:
        raise
    except Exception as error:  # loaders of four formats raise whatever their parsers do
        raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: {first_line(error)}") from error


def _load(checkpoint: Checkpoint, dtype: Any, platform: Platform, ranks: int) -> Any:
    from tandem.runners.torch.accounting import refuse_fields
    from tandem.runners.torch.from_tensors import configuration, module_from
    from tandem.runners.torch.model import load_module

    scaled = checkpoint.gguf is None and quantisation_of(configuration_folder(checkpoint)) is not None
    if scaled and platform.name == "cpu":
        if ranks > 1:
            raise CheckpointError(f"{checkpoint.folder}: tp_degree: a quantised checkpoint is loaded in one process")
        folder = weights_folder(checkpoint)
        module = module_from(folder, configuration(folder), ScaledWeights(folder), dtype)
        refuse_fields(read_configuration(checkpoint), module)
        return module
    if checkpoint.gguf is None and Path(checkpoint.folder).is_dir() and not scaled:
        check_dense(Path(checkpoint.folder))
    module = load_module(checkpoint.source, dtype, platform.device, sharding(checkpoint.source, ranks))
    if checkpoint.gguf is None:
        refuse_fields(read_configuration(checkpoint), module)
    return module


def stored_weights(checkpoint: Checkpoint, weights: str) -> StoredWeights | None:
    """The blocks of a checkpoint's GGUF file, if there is one and `weights` asks for them. Raises CheckpointError."""
    file = checkpoint.gguf_file if weights == "as-stored" else None
    return StoredWeights(file) if file else None
