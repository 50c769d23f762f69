"""Loads a checkpoint into a runner: chooses dtype, device and threads, loads weights, reports errors in one line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.locate import (
    Checkpoint,
    CheckpointError,
    check_sizes,
    first_line,
    frequent_tokens,
    weights_revision,
)
from tandem.runners.native import NativeUnavailable
from tandem.runners.protocol import TAIL, Limits, Runner, RunnerIdentity
from tandem.runners.startup import Startup
from tandem.runners.torch.buckets import RequestedBuckets
from tandem.runners.torch.platforms import DEVICES, Platform, choose_platform, compile_order, platform_of
from tandem.runners.torch.tensor_parallel import sharding

Only = Sequence[int] | None  # the token ids that a draft model's head is cut down to
log = logging.getLogger("tandem.engine")
COMPILE = ("auto", "native", "inductor", "neuron", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CHUNK = 64
SMALL = 50_000_000  # parameters


@dataclass(frozen=True, slots=True)
class Execution:
    """How models run. `threads`: None leaves the choice to torch.

    `compile`: what runs a step. "native" is our C++ (CPU), "inductor" and "neuron" compile torch modules into graphs,
    "off" runs the modules as they are; "auto" is native where available (the fastest, benchmarks/README.md), graphs on
    CUDA and Trainium, else off. `exact`: if kernels differ in their last bits, use a single shape; otherwise use all,
    and report bit_exact false in GetModelInfo. `compiled`: the folder of compiled code. `cores`: the device's cores
    that this process uses, such as "0-3". `tp_degree`: number of processes that share the target.
    """

    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    compile: str = "auto"
    exact: bool = True
    compiled: str | None = None
    cores: str | None = None
    tp_degree: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ValueError(f"device: {self.device!r} is not one of {', '.join(DEVICES)}")
        if self.compile not in COMPILE:
            raise ValueError(f"compile: {self.compile!r} is not one of {', '.join(COMPILE)}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads: {self.threads} is below 1")
        if self.tp_degree < 1:
            raise ValueError(f"tp_degree: {self.tp_degree} is below 1")


@dataclass(frozen=True, slots=True)
class Shape:
    """A server's sizes: KV slots, tokens per sequence, draft tokens per round.

    `chunk`: tokens of a prefill step. `requested_buckets`: graph buckets that the user chose.
    """

    slots: int = 4
    max_length: int = 512
    max_draft: int = 5
    chunk: int = CHUNK
    requested_buckets: RequestedBuckets = field(default_factory=RequestedBuckets)


def load_runner(
    checkpoint: Checkpoint,
    execution: Execution,
    shape: Shape,
    verifies: bool = True,
    sole_model: bool = False,
    startup: Startup | None = None,
) -> Runner:
    """Loads a torch runner; on the device thread. Raises CheckpointError or ValueError, one line each.

    `sole_model`: a small model on the CPU then uses one thread. Its products are no faster on two, and a second thread
    would spin after each, taking a core away from a target on the same machine.
    """
    startup = startup or Startup()
    with startup.stage("importing"):
        import torch

        import tandem.runners.torch.model  # noqa: F401  (else its import counts as "loading")

    if execution.threads:
        torch.set_num_threads(execution.threads)
    transformers_logging()
    platform, ranks = choose_platform(execution.device), execution.tp_degree if verifies else 1
    order = compile_order(execution.compile, platform, ranks)
    _check_graphs(order, execution, shape)
    platform.prepare(execution.compiled, execution.cores)
    log.info("%s is loaded on %s", checkpoint.name, platform.describe())
    dtype = choose_dtype(execution.dtype, platform.name)
    checkpoint = unpacked(checkpoint)
    check_sizes(checkpoint)
    with startup.stage("loading"):
        module = _module(checkpoint, dtype, platform, ranks)
    small = sum(p.numel() for p in module.parameters()) < SMALL
    if sole_model and small and platform.packs and execution.threads is None:
        torch.set_num_threads(1)
    chunk, vocab_size = min(shape.chunk, shape.max_length), int(module.config.vocab_size)
    limits = Limits(shape.slots, shape.max_length, shape.max_draft, chunk, vocab_size)
    inputs = RunnerInputs(module, checkpoint, platform, limits, shape.requested_buckets, execution, verifies, ranks)
    with startup.stage("packing"):
        try:
            for how in order:
                try:
                    return _RUNNERS[how](inputs)
                except NativeUnavailable as error:
                    if execution.compile != "auto":
                        raise NativeRefused(f"compile: native steps are not available: {error}") from None
                    log.info("%s runs without native steps: %s", checkpoint.name, error)
        except NativeRefused:
            raise
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from None
    raise AssertionError("the last way always works")


def _check_graphs(order: Sequence[str], execution: Execution, shape: Shape) -> None:
    """Raises ValueError if graph options are given and no graphs will be made."""
    requested_buckets = {
        "batch_buckets": shape.requested_buckets.batches,
        "draft_buckets": shape.requested_buckets.drafts,
        "compiled_dir": execution.compiled,
    }
    for name, value in requested_buckets.items():
        if value and not {"inductor", "neuron"} & set(order):
            raise ValueError(f"{name}: is for graphs, and --compile {execution.compile} makes none here")


@dataclass(frozen=True, slots=True)
class RunnerInputs:
    """Everything that a runner is made from."""

    module: Any
    checkpoint: Checkpoint
    platform: Platform
    limits: Limits
    requested_buckets: RequestedBuckets
    execution: Execution
    verifies: bool
    ranks: int

    @property
    def only(self) -> Only:
        return None if self.verifies else frequent_tokens(self.checkpoint)

    @property
    def widest(self) -> int:
        """Tokens per row of the widest step."""
        return max(self.limits.max_draft + 1, self.limits.chunk, TAIL)

    def identity(self, backend: str) -> RunnerIdentity:
        return RunnerIdentity(
            model_name=self.checkpoint.name,
            weights_revision=weights_revision(self.checkpoint),
            dtype=str(self.module.dtype).removeprefix("torch."),
            device=self.platform.name,
            backend=backend,
            end_of_sequence_ids=end_ids(self.module),
        )


def _module(checkpoint: Checkpoint, dtype: Any, platform: Platform, ranks: int) -> Any:
    from tandem.runners.torch.model import load_module

    try:
        return load_module(checkpoint.source, dtype, platform.device, sharding(checkpoint.source, ranks))
    except CheckpointError:
        raise
    except Exception as error:  # loaders of four formats raise whatever their parsers do
        raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: {first_line(error)}") from error


class NativeRefused(ValueError):
    """Native steps were requested but are unavailable."""


def _native(inputs: RunnerInputs) -> Runner:
    import torch

    from tandem.runners.native.load import load_native

    small = sum(p.numel() for p in inputs.module.parameters()) < SMALL
    threads = 1 if small else inputs.execution.threads or torch.get_num_threads()
    return load_native(inputs.module, threads, inputs.limits, inputs.identity("native"), inputs.verifies, inputs.only)


def _off(inputs: RunnerInputs) -> Runner:
    from tandem.runners.torch.model import TorchModel
    from tandem.runners.torch.runner import TorchRunner

    limits, device = inputs.limits, inputs.platform.device
    model = TorchModel(
        inputs.module, limits.slots, limits.max_length, inputs.widest, device, inputs.only, ranks=inputs.ranks
    )
    return TorchRunner(model, limits, inputs.identity("torch"), inputs.verifies, inputs.execution.exact)


def _graphs(inputs: RunnerInputs) -> Runner:
    from tandem.runners.torch.graph_compilers import graph_compiler
    from tandem.runners.torch.graph_model import GraphModel
    from tandem.runners.torch.graph_runner import GraphRunner

    limits, platform, identity = inputs.limits, inputs.platform, inputs.identity("torch")
    model = GraphModel(
        inputs.module, limits.slots, limits.max_length, inputs.widest, platform.device, inputs.only, ranks=inputs.ranks
    )
    make = graph_compiler(platform, identity, limits, inputs.only, inputs.execution.compiled)
    return GraphRunner(model, limits, identity, make, inputs.verifies, inputs.execution.exact, inputs.requested_buckets)


_RUNNERS = {"native": _native, "off": _off, "inductor": _graphs, "neuron": _graphs}


def transformers_logging() -> None:
    """Silences transformers' progress bars and advice, which do not belong in a server's log."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def choose_device(name: str) -> str:
    """The name of the device to use; resolves auto. Raises ValueError."""
    return choose_platform(name).name


def choose_dtype(name: str, device: str):  # type: ignore[no-untyped-def]
    """The torch dtype called `name`; auto is bfloat16 if the device multiplies it natively, else float32."""
    import torch

    if name != "auto":
        return getattr(torch, name)
    return torch.bfloat16 if platform_of(device).has_bfloat16() else torch.float32


def end_ids(module) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """Token ids that end a sequence, from the generation config or else the model's config."""
    eos = getattr(module.generation_config, "eos_token_id", None)
    if eos is None:
        eos = module.config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
