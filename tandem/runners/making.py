"""Makes the runner of a loaded module: graphs or module code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.checkpoints.family_configs import end_ids as ids_of
from tandem.checkpoints.generation_config import all_end_ids
from tandem.checkpoints.locate import Checkpoint, CheckpointError, first_line, frequent_tokens, weights_revision
from tandem.host.memory import given_on_demand
from tandem.runners.fits import UnsupportedModel
from tandem.runners.models import QUANTISED
from tandem.runners.native import NativeUnavailable
from tandem.runners.protocol import TAIL, Limits, Runner, RunnerIdentity
from tandem.runners.torch.buckets import buckets_for
from tandem.runners.torch.platforms import Platform

if TYPE_CHECKING:
    from tandem.runners.loading import Execution, Shape
    from tandem.runners.torch.model import TorchModel

Model = TypeVar("Model", bound="TorchModel")
DraftVocab = Sequence[int] | None  # the token ids that a draft model's head is cut down to


@dataclass(frozen=True, slots=True)
class RunnerInputs:
    """Everything that a runner is made from."""

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
        """Tokens per row of the widest step."""
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
    """Makes the runner of the first of these ways to compile. Raises CheckpointError."""
    try:
        return _off(inputs) if order[0] == "off" else _graphs(inputs)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{inputs.checkpoint.folder}: {error}") from None


def check_dispensable(execution: Execution, error: NativeUnavailable) -> None:
    """Raises NativeRefused if native steps, which are unavailable, were requested or are needed."""
    if execution.weights in QUANTISED:
        raise NativeRefused(f"weights: {execution.weights} needs native steps: {error}") from None
    if execution.compile != "auto":
        raise NativeRefused(f"compile: native steps are not available: {error}") from None


def _checked(make: Callable[..., Model], inputs: RunnerInputs, **options: Any) -> Model:
    """A model on a slot cache that computes what its module computes alone. Raises UnsupportedModel, or what is one."""
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
    from tandem.runners.torch.graph_compilers import graph_compiler
    from tandem.runners.torch.graph_model import GraphModel
    from tandem.runners.torch.graph_runner import GraphRunner

    limits, platform, identity = inputs.limits, inputs.platform, inputs.identity("torch")
    model = _checked(GraphModel, inputs)
    make = graph_compiler(platform, identity, limits, inputs.draft_vocab, inputs.execution.compiled)
    buckets = buckets_for(model.platform, limits, inputs.shape.batch_buckets, inputs.shape.draft_buckets)
    return GraphRunner(model, limits, identity, make, inputs.verifies, inputs.execution.exact, buckets)


def end_ids(module) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """Token ids that end a sequence, where no file says one: those of the module's classes."""
    return ids_of(getattr(module.generation_config, "eos_token_id", None)) or ids_of(module.config.eos_token_id)
