"""Loads a checkpoint into a runner: chooses dtype, device and threads, loads weights, reports errors in one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.checkpoints.eagle_heads import is_eagle1
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.locate import (
    Checkpoint,
    CheckpointError,
    check_sizes,
    frequent_tokens,
    weights_revision,
)
from tandem.runners.models import WHEN_LOADED, in_own_format, load_model, stored_weights
from tandem.runners.native import NativeUnavailable
from tandem.runners.protocol import TAIL, Limits, Runner, RunnerIdentity
from tandem.runners.startup import Startup
from tandem.runners.torch.buckets import buckets_for
from tandem.runners.torch.platforms import DEVICES, Platform, choose_platform, compile_order, platform_of
from tandem.runners.torch.tensor_parallel import Ranks

if TYPE_CHECKING:
    from tandem.runners.native.weights import Packing

DraftVocab = Sequence[int] | None  # the token ids that a draft model's head is cut down to
log = logging.getLogger("tandem.engine")
COMPILE = ("auto", "native", "inductor", "neuron", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTISED = (*WHEN_LOADED, "as-stored")
WEIGHTS = ("auto", "bfloat16", "float32", *QUANTISED)
CHUNK = 64
SMALL = 50_000_000  # parameters


@dataclass(frozen=True, slots=True)
class Execution:
    """How models run. `threads`: None leaves the choice to torch.

    `dtype` is the number format of activations, KV cache and, unless `weights` says otherwise, weights. `weights`:
    "int8" and "q4" quantise matrices, once for each model, "as-stored" runs the blocks of a GGUF file as they are;
    "auto" is as-stored for a GGUF file in blocks and int8 for a checkpoint in int8, else the dtype.

    `compile`: what runs a step. "native" is our C++ (CPU), "inductor" and "neuron" compile torch modules into graphs,
    "off" runs the modules as they are; "auto" is native where available (the fastest, benchmarks/README.md), graphs on
    CUDA and Trainium, else off. `exact`: if kernels differ in their last bits, use a single shape; otherwise use all,
    and report bit_exact false in GetModelInfo. `compiled`: the folder of compiled code. `cores`: the device's cores
    that the processes use which share the target, such as "0-3". `tp_degree`: number of those processes.
    """

    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    compile: str = "auto"
    exact: bool = True
    compiled: str | None = None
    cores: str | None = None
    tp_degree: int = 1
    weights: str = "auto"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights: {self.weights!r} is not one of {', '.join(WEIGHTS)}")
        if self.weights in DTYPES and "auto" not in (self.weights, self.dtype) and self.weights != self.dtype:
            raise ValueError(f"weights: {self.weights} contradicts dtype {self.dtype}")
        if self.weights in QUANTISED:
            self._check_quantised()
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

    def _check_quantised(self) -> None:
        """Quantised weights run in native steps alone."""
        if self.compile not in ("auto", "native"):
            raise ValueError(f"weights: {self.weights} runs in native steps, not with compile {self.compile}")
        if self.device not in ("auto", "cpu") or self.tp_degree > 1:
            raise ValueError(f"weights: {self.weights} runs on the CPU, in one process")
        if self.dtype == "float16":
            raise ValueError(f"weights: {self.weights} goes with dtype float32 or bfloat16")

    @property
    def number_format(self) -> str:
        """The dtype, which dense weights and all activations have."""
        return self.weights if self.weights not in ("auto", *QUANTISED) else self.dtype


@dataclass(frozen=True, slots=True)
class Shape:
    """A server's sizes: KV slots, tokens per sequence, draft tokens per round.

    `chunk`: tokens of a prefill step. `batch_buckets`, `draft_buckets`: rows and draft tokens per step that graphs are
    made for; empty: chosen for the platform.
    """

    slots: int = 4
    max_length: int = 512
    max_draft: int = 5
    chunk: int = CHUNK
    batch_buckets: tuple[int, ...] = ()
    draft_buckets: tuple[int, ...] = ()


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
    if is_head(Path(checkpoint.folder)):
        raise CheckpointError(
            f"{checkpoint.folder}: an EAGLE-3 head, which runs beside its target alone: fused_target --draft_model"
        )
    if is_eagle1(Path(checkpoint.folder)):
        raise CheckpointError(
            f"{checkpoint.folder}: an EAGLE-1 head, which NxD Inference alone serves: fused_target --eagle"
        )
    with startup.stage("importing"):
        import torch

        import tandem.runners.torch.model  # noqa: F401  (else its import counts as "loading")

    platform, ranks = prepared_platform(execution), execution.tp_degree if verifies else 1
    if threads := execution.threads or (execution.cores and platform.packs and len(os.sched_getaffinity(0))):
        torch.set_num_threads(threads)
    transformers_logging()
    order = compile_order(execution.compile, platform, ranks)
    if execution.weights in QUANTISED and "native" not in order:
        raise ValueError(f"weights: {execution.weights} runs on the CPU, and the device is {platform.name}")
    _check_graphs(order, execution, shape)
    log.info("%s is loaded on %s", checkpoint.name, platform.describe())
    checkpoint, requested = unpacked(checkpoint), execution
    execution = in_own_format(requested, checkpoint, order)
    dtype = choose_dtype(_number_format(execution, checkpoint), platform.name)
    check_sizes(checkpoint)
    module, packing = load_model(checkpoint, execution.weights, dtype, platform, ranks, startup)
    small = sum(p.numel() for p in module.parameters()) < SMALL
    if sole_model and small and platform.packs and execution.threads is None:
        torch.set_num_threads(1)
    chunk, vocab_size = min(shape.chunk, shape.max_length), int(module.config.vocab_size)
    limits = Limits(shape.slots, shape.max_length, shape.max_draft, chunk, vocab_size)
    inputs = RunnerInputs(module, packing, checkpoint, platform, limits, shape, execution, verifies, ranks)
    with startup.stage("packing"):
        try:
            for how in order:
                try:
                    return _RUNNERS[how](inputs)
                except NativeUnavailable as error:
                    if execution != requested and execution.compile == "auto":
                        log.info("%s runs without native steps, and not as stored: %s", checkpoint.name, error)
                        break
                    if execution.weights in QUANTISED:
                        raise NativeRefused(f"weights: {execution.weights} needs native steps: {error}") from None
                    if execution.compile != "auto":
                        raise NativeRefused(f"compile: native steps are not available: {error}") from None
                    log.info("%s runs without native steps: %s", checkpoint.name, error)
        except (NativeRefused, CheckpointError):
            raise
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from None
    return load_runner(checkpoint, replace(requested, compile="off"), shape, verifies, sole_model, startup)


def prepared_platform(execution: Execution) -> Platform:
    """The platform of a process. Its cores are set first, because a query of the device may reserve them.

    Raises ValueError if it is unavailable, or its cores do not suffice.
    """
    if execution.device != "auto":
        platform = platform_of(execution.device)
    elif execution.cores is None:
        platform = choose_platform("auto")
    else:
        raise ValueError("cores: name the --device whose cores these are")
    ranks = Ranks.from_environment(execution.tp_degree)
    platform.prepare(execution.compiled, execution.cores, ranks.rank, ranks.degree)
    platform.require()
    return platform


def _check_graphs(order: Sequence[str], execution: Execution, shape: Shape) -> None:
    """Raises ValueError if graph options are given and no graphs will be made."""
    options = {
        "batch_buckets": shape.batch_buckets,
        "draft_buckets": shape.draft_buckets,
        "compiled_dir": execution.compiled,
    }
    for name, value in options.items():
        if value and not {"inductor", "neuron"} & set(order):
            raise ValueError(f"{name}: is for graphs, and --compile {execution.compile} makes none here")


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


def _number_format(execution: Execution, checkpoint: Checkpoint) -> str:
    """The dtype to choose. Beside quantised weights auto is float32: activations are few, and lose enough in 8 bits."""
    stored = stored_weights(checkpoint, execution.weights)
    if execution.number_format != "auto" or not (execution.weights in WHEN_LOADED or (stored and stored.formats())):
        return execution.number_format
    return "float32"


class NativeRefused(ValueError):
    """Native steps were requested but are unavailable."""


def _native(inputs: RunnerInputs) -> Runner:
    import torch

    from tandem.runners.native.load import load_native

    small = sum(p.numel() for p in inputs.module.parameters()) < SMALL
    threads = 1 if small else inputs.execution.threads or torch.get_num_threads()
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
