"""Loads a checkpoint's module and makes its runner: graphs or module code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.checkpoints.family_configs import end_ids as ids_of
from tandem.checkpoints.generation_config import all_end_ids
from tandem.checkpoints.gguf_blocks import StoredWeights
from tandem.checkpoints.hub_files import configuration_folder, read_configuration, weights_folder
from tandem.checkpoints.locate import Checkpoint, CheckpointError, first_line, frequent_tokens, weights_revision
from tandem.checkpoints.scaled_weights import INT8, ScaledWeights, check_dense, quantisation_of
from tandem.host.memory import given_on_demand
from tandem.runners.fits import UnsupportedModel
from tandem.runners.native import NativeUnavailable
from tandem.runners.protocol import TAIL, Limits, Runner, RunnerIdentity
from tandem.runners.torch.buckets import buckets_for
from tandem.runners.torch.platforms import Platform
from tandem.runners.torch.tensor_parallel import sharding

if TYPE_CHECKING:
    from tandem.runners.loading import Execution, Shape
    from tandem.runners.torch.model import TorchModel

WHEN_LOADED = ("int8", "q4")  # values of --weights that quantise dense matrices
SMALL = 50_000_000  # parameters; a smaller model's products are no faster on two threads than on one
QUANTISED = (*WHEN_LOADED, "as-stored")

Model = TypeVar("Model", bound="TorchModel")
DraftVocab = Sequence[int] | None  # the token ids that a draft model's head is cut down to


@dataclass(frozen=True, slots=True)
class RunnerInputs:
    module: Any
    checkpoint: Checkpoint
    platform: Platform
    limits: Limits
    shape: Shape
    execution: Execution
    verifies: bool
    ranks: int

    @property
    def draft_vocab(self) -> DraftVocab:
        return None if self.verifies else frequent_tokens(self.checkpoint, self.limits.vocab_size)

    @property
    def widest(self) -> int:
        return max(self.limits.max_draft + 1, self.limits.chunk, TAIL)

    @property
    def dtype(self) -> str:
        return str(self.module.dtype).removeprefix("torch.")

    def identity(self, backend: str, dtype: str | None = None) -> RunnerIdentity:
        return RunnerIdentity(
            model_name=self.checkpoint.name,
            weights_revision=weights_revision(self.checkpoint),
            dtype=dtype or self.dtype,
            device=self.platform.name,
            backend=backend,
            end_of_sequence_ids=all_end_ids(self.checkpoint, end_ids(self.module)),
        )


class NativeRefused(ValueError):
    """Native steps were requested but are unavailable."""


def made(inputs: RunnerInputs, order: Sequence[str]) -> Runner:
    """Makes a runner by the first value of --compile in `order` that works. Raises CheckpointError."""
    try:
        return _off(inputs) if order[0] == "off" else _graphs(inputs)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{inputs.checkpoint.folder}: {error}") from None


def check_dispensable(execution: Execution, error: NativeUnavailable) -> None:
    """Raises NativeRefused if native steps were requested or are needed."""
    if execution.weights in QUANTISED:
        raise NativeRefused(f"weights: {execution.weights} needs native steps: {error}") from None
    if execution.compile != "auto":
        raise NativeRefused(f"compile: native steps are not available: {error}") from None


def _checked(make: Callable[..., Model], inputs: RunnerInputs, **options: Any) -> Model:
    from tandem.runners.torch.own_forward import check_own_forward

    limits, platform = inputs.limits, inputs.platform
    sizes = (limits.slots, limits.max_length, inputs.widest, platform.device, inputs.draft_vocab)
    try:
        model = make(inputs.module, *sizes, ranks=inputs.ranks, **options)
        if not platform.only_graphs:
            check_own_forward(model)
    except UnsupportedModel:
        raise
    except Exception as error:  # of any family's code, which may not know a cache of slots
        kind = inputs.module.config.model_type
        raise UnsupportedModel(f"module code cannot run {kind} on a slot cache: {first_line(error)}") from error
    return model


def _off(inputs: RunnerInputs) -> Runner:
    from tandem.runners.torch.model import TorchModel
    from tandem.runners.torch.runner import TorchRunner

    limits, device, ranks = inputs.limits, inputs.platform.device, inputs.ranks
    on_demand = device == "cpu" and ranks == 1 and given_on_demand()
    model = _checked(TorchModel, inputs, on_demand=on_demand)
    return TorchRunner(model, limits, inputs.identity("torch"), inputs.verifies, inputs.execution.exact)


def _graphs(inputs: RunnerInputs) -> Runner:
    from tandem.runners.torch.graph_model import GraphModel
    from tandem.runners.torch.graph_runner import GraphRunner
    from tandem.runners.torch.graphs import graph_compiler

    limits, platform, identity = inputs.limits, inputs.platform, inputs.identity("torch")
    model = _checked(GraphModel, inputs)
    make = graph_compiler(platform, identity, limits, inputs.draft_vocab, inputs.execution.compiled)
    buckets = buckets_for(model.platform, limits, inputs.shape.batch_buckets, inputs.shape.draft_buckets)
    return GraphRunner(model, limits, identity, make, inputs.verifies, inputs.execution.exact, buckets)


def end_ids(module) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """End tokens by the module's classes, for checkpoints without such a file."""
    return ids_of(getattr(module.generation_config, "eos_token_id", None)) or ids_of(module.config.eos_token_id)


def in_own_format(execution: Execution, checkpoint: Checkpoint, order: Sequence[str]) -> Execution:
    """Replaces `auto` weights by the checkpoint's own format, if native steps run it. Raises CheckpointError."""
    if execution.weights != "auto" or execution.dtype == "float16" or execution.tp_degree > 1 or "native" not in order:
        return execution
    if (file := checkpoint.gguf_file) and execution.dtype == "auto" and StoredWeights(file).runs_as_stored:
        return replace(execution, weights="as-stored")
    schemes = None if checkpoint.gguf else quantisation_of(configuration_folder(checkpoint))
    is_int8 = schemes is not None and all(scheme.numbers == INT8 for scheme in schemes)
    return replace(execution, weights="int8") if is_int8 else execution


def load_model(checkpoint: Checkpoint, dtype: Any, platform: Platform, ranks: int) -> Any:
    """Loads a module. Raises CheckpointError."""
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
    """The blocks of a GGUF file, if `weights` uses them. Raises CheckpointError."""
    file = checkpoint.gguf_file if weights == "as-stored" else None
    return StoredWeights(file) if file else None
