"""Makes the runner of a loaded module: native steps, graphs or module code."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.locate import Checkpoint, CheckpointError, frequent_tokens, weights_revision
from tandem.runners.models import QUANTISED
from tandem.runners.native import NativeUnavailable
from tandem.runners.protocol import TAIL, Limits, Runner, RunnerIdentity
from tandem.runners.torch.buckets import buckets_for
from tandem.runners.torch.platforms import Platform

if TYPE_CHECKING:
    from tandem.runners.loading import Execution, Shape
    from tandem.runners.native.weights import Packing

DraftVocab = Sequence[int] | None  # the token ids that a draft model's head is cut down to
log = logging.getLogger("tandem.engine")
SMALL = 50_000_000  # parameters


@dataclass(frozen=True, slots=True)
class RunnerInputs:
    """Everything that a runner is made from."""

    module: Any
    packing: Packing
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
            end_of_sequence_ids=end_ids(self.module),
        )


class NativeRefused(ValueError):
    """Native steps were requested but are unavailable."""


def made(inputs: RunnerInputs, order: Sequence[str], as_requested: bool) -> Runner | None:
    """Makes the runner of the first of these ways to compile that is available. Raises CheckpointError, NativeRefused.

    Returns None if the checkpoint is to be loaded again for module code: none of them is available, or its weights were
    to run as stored, though that was not requested (`as_requested`), and only native steps can.
    """
    try:
        for how in order:
            try:
                return _RUNNERS[how](inputs)
            except NativeUnavailable as error:
                name = inputs.checkpoint.name
                if not as_requested and inputs.execution.compile == "auto":
                    log.info("%s runs without native steps, and not as stored: %s", name, error)
                    return None
                _check_dispensable(inputs.execution, error)
                log.info("%s runs without native steps: %s", name, error)
    except (NativeRefused, CheckpointError):
        raise
    except ValueError as error:
        raise CheckpointError(f"{inputs.checkpoint.folder}: {error}") from None
    return None


def _check_dispensable(execution: Execution, error: NativeUnavailable) -> None:
    """Raises NativeRefused if native steps, which are unavailable, were requested or are needed."""
    if execution.weights in QUANTISED:
        raise NativeRefused(f"weights: {execution.weights} needs native steps: {error}") from None
    if execution.compile != "auto":
        raise NativeRefused(f"compile: native steps are not available: {error}") from None


def _native(inputs: RunnerInputs) -> Runner:
    import torch

    from tandem.runners.native.load import load_native

    threads = 1 if is_small(inputs.module) else inputs.execution.threads or torch.get_num_threads()
    identity = inputs.identity("native", inputs.packing.describe(inputs.dtype))
    return load_native(
        inputs.module, threads, inputs.limits, identity, inputs.verifies, inputs.draft_vocab, inputs.packing
    )


def _off(inputs: RunnerInputs) -> Runner:
    from tandem.runners.torch.model import TorchModel
    from tandem.runners.torch.on_demand import available
    from tandem.runners.torch.runner import TorchRunner

    limits, device, ranks = inputs.limits, inputs.platform.device, inputs.ranks
    on_demand = device == "cpu" and ranks == 1 and available()
    model = TorchModel(
        inputs.module,
        limits.slots,
        limits.max_length,
        inputs.widest,
        device,
        inputs.draft_vocab,
        ranks=ranks,
        on_demand=on_demand,
    )
    return TorchRunner(model, limits, inputs.identity("torch"), inputs.verifies, inputs.execution.exact)


def _graphs(inputs: RunnerInputs) -> Runner:
    from tandem.runners.torch.graph_compilers import graph_compiler
    from tandem.runners.torch.graph_model import GraphModel
    from tandem.runners.torch.graph_runner import GraphRunner

    limits, platform, identity = inputs.limits, inputs.platform, inputs.identity("torch")
    model = GraphModel(
        inputs.module,
        limits.slots,
        limits.max_length,
        inputs.widest,
        platform.device,
        inputs.draft_vocab,
        ranks=inputs.ranks,
    )
    make = graph_compiler(platform, identity, limits, inputs.draft_vocab, inputs.execution.compiled)
    buckets = buckets_for(model.platform, limits, inputs.shape.batch_buckets, inputs.shape.draft_buckets)
    return GraphRunner(model, limits, identity, make, inputs.verifies, inputs.execution.exact, buckets)


_RUNNERS = {"native": _native, "off": _off, "inductor": _graphs, "neuron": _graphs}


def is_small(module: Any) -> bool:
    """Whether a model is so small that its products are no faster on two threads than on one."""
    return sum(p.numel() for p in module.parameters()) < SMALL


def end_ids(module) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """Token ids that end a sequence, from the generation config or else the model's config."""
    eos = getattr(module.generation_config, "eos_token_id", None)
    if eos is None:
        eos = module.config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
