"""Loads a checkpoint into a runner: chooses dtype, device and threads, reports errors in one line."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.checkpoints.adapter_files import Adapter, AdapterChoice, read_adapter
from tandem.checkpoints.convert import is_eagle1
from tandem.checkpoints.family_configs import end_ids as ids_of
from tandem.checkpoints.generation_config import all_end_ids
from tandem.checkpoints.gguf_blocks import StoredWeights
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.hub_files import configuration_folder, is_installed, need, read_configuration, weights_folder
from tandem.checkpoints.locate import (
    Checkpoint,
    CheckpointError,
    check_sizes,
    find,
    first_line,
    frequent_tokens,
    weights_revision,
)
from tandem.checkpoints.scaled_weights import INT8, ScaledWeights, check_dense, quantisation_of
from tandem.host.cores import given_on_demand, usable_cores
from tandem.runners.backends import Backend, LoadRequest
from tandem.runners.families import UnsupportedModel, check_family
from tandem.runners.native import LibraryMissing, NativeUnavailable
from tandem.runners.protocol import TAIL, Limits, Runner, RunnerIdentity
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import DEVICES, Platform, choose_platform, compile_order, platform_of
from tandem.runners.torch.tensor_parallel import Ranks, sharding

log = logging.getLogger("tandem.engine")
WHEN_LOADED = ("int8", "q4")  # values of --weights that quantise dense matrices
QUANTISED = (*WHEN_LOADED, "as-stored")
COMPILE = ("auto", "native", "inductor", "neuron", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "bfloat16", "float32", *QUANTISED)
CHUNK = 64
SMALL = 50_000_000  # parameters; a smaller model's products are no faster on two threads than on one


@dataclass(frozen=True, slots=True)
class Execution:
    """How models run."""

    device: str = "auto"
    dtype: str = "auto"  # of activations, KV cache and dense weights
    threads: int | None = None  # None: one per core
    compile: str = "auto"  # native C++, inductor or neuron graphs, or off: module code
    exact: bool = True  # use one step shape if kernels differ in their last bits, else all
    compiled: str | None = None  # folder of compiled code
    cores: str | None = None  # such as "0-3", for all processes
    tp_degree: int = 1  # processes that share the target
    weights: str = "auto"  # int8 and q4 quantise; as-stored runs a GGUF file's blocks; auto: a file's own format
    recertify: bool | None = None  # None: check native steps; True: check and note it; False: trust a note
    untested_model: bool = False  # also try families not in families.py

    def __post_init__(self) -> None:
        known = {"weights": WEIGHTS, "dtype": DTYPES, "device": DEVICES, "compile": COMPILE}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(values)}")
        if self.weights in DTYPES and "auto" not in (self.weights, self.dtype) and self.weights != self.dtype:
            raise ValueError(f"weights: {self.weights} contradicts dtype {self.dtype}")
        if self.weights in QUANTISED:
            self._check_quantised()
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads: {self.threads} is below 1")
        if self.tp_degree < 1:
            raise ValueError(f"tp_degree: {self.tp_degree} is below 1")

    def _check_quantised(self) -> None:
        if self.compile not in ("auto", "native"):
            raise ValueError(f"weights: {self.weights} runs in native steps, not with compile {self.compile}")
        if self.device not in ("auto", "cpu") or self.tp_degree > 1:
            raise ValueError(f"weights: {self.weights} runs on the CPU, in one process")
        if self.dtype == "float16":
            raise ValueError(f"weights: {self.weights} goes with dtype float32 or bfloat16")

    @property
    def number_format(self) -> str:
        """The dtype of dense weights and all activations."""
        return self.weights if self.weights not in ("auto", *QUANTISED) else self.dtype


@dataclass(frozen=True, slots=True)
class Shape:
    """KV slots, tokens per sequence, draft and prefill step; buckets of graphs (empty: the platform's)."""

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
    """Loads native steps, graphs or module code; on the device thread. Raises CheckpointError or ValueError."""
    startup = startup or Startup()
    _refuse_heads(Path(checkpoint.folder))
    if checkpoint.gguf is None:
        check_family(checkpoint.folder, read_configuration(checkpoint), execution.untested_model)
    platform, ranks = prepared_platform(execution), execution.tp_degree if verifies else 1
    order = _order(execution, shape, platform, ranks)
    log.info("%s is loaded on %s", checkpoint.name, platform.describe())
    check_sizes(checkpoint)
    if order[0] == "native":
        if native := _load_native(checkpoint, execution, order, shape, verifies, startup):
            return native
        order = order[1:] or ("off",)
    need(f"{checkpoint.name}: compile {order[0]} on {platform.name}", "torch", "transformers")
    with startup.stage("importing"):
        import torch

        import tandem.runners.torch.slot_model  # noqa: F401  (else its import counts as "loading")
    if threads := execution.threads or (execution.cores and platform.packs and usable_cores()):
        torch.set_num_threads(threads)
    elif torch.get_num_threads() > usable_cores() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())  # torch knows no quota of a container
    transformers_logging()
    checkpoint = unpacked(checkpoint)
    with startup.stage("loading"):
        dtype = choose_dtype(execution.number_format, platform.name)
        module = _load_module(checkpoint, dtype, platform, ranks)
    parameters = sum(each.numel() for each in module.parameters())
    # a second thread would spin after each small product, taking a core from a target
    if sole_model and platform.packs and execution.threads is None and parameters < SMALL:
        torch.set_num_threads(1)
    with startup.stage("packing"):
        try:
            return _runner(module, checkpoint, platform, ranks, execution, shape, verifies, order[0] != "off")
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from None


def _runner(
    module: Any,
    checkpoint: Checkpoint,
    platform: Platform,
    ranks: int,
    execution: Execution,
    shape: Shape,
    verifies: bool,
    graphs: bool,
) -> Runner:
    from tandem.runners.torch.graph_model import GraphModel
    from tandem.runners.torch.graph_runner import GraphRunner
    from tandem.runners.torch.graphs import GraphCompiler, buckets_for
    from tandem.runners.torch.module_checks import check_own_forward
    from tandem.runners.torch.slot_model import TorchModel
    from tandem.runners.torch.torch_runner import TorchRunner

    chunk, vocab_size = min(shape.chunk, shape.max_length), int(module.config.vocab_size)
    limits = Limits(shape.slots, shape.max_length, shape.max_draft, chunk, vocab_size)
    only = None if verifies else frequent_tokens(checkpoint, vocab_size)
    widest = max(limits.max_draft + 1, chunk, TAIL)
    on_demand = not graphs and platform.device == "cpu" and ranks == 1 and given_on_demand()
    sizes = (limits.slots, limits.max_length, widest, platform.device, only)
    try:
        model = (GraphModel if graphs else TorchModel)(module, *sizes, ranks=ranks, on_demand=on_demand)
        if not platform.only_graphs:
            check_own_forward(model)
    except UnsupportedModel:
        raise
    except Exception as error:  # of any family's code, which may not know a cache of slots
        kind = module.config.model_type
        raise UnsupportedModel(f"module code cannot run {kind} on a slot cache: {first_line(error)}") from error
    identity = RunnerIdentity(
        model_name=checkpoint.name,
        weights_revision=weights_revision(checkpoint),
        dtype=str(module.dtype).removeprefix("torch."),
        device=platform.name,
        backend="torch",
        end_of_sequence_ids=all_end_ids(checkpoint, end_ids(module)),
    )
    if not isinstance(model, GraphModel):
        return TorchRunner(model, limits, identity, verifies, execution.exact)
    make = functools.partial(GraphCompiler, platform.backend)
    buckets = buckets_for(model.platform, limits, shape.batch_buckets, shape.draft_buckets)
    return GraphRunner(model, limits, identity, make, verifies, execution.exact, buckets)


def _load_native(
    checkpoint: Checkpoint, execution: Execution, order: Sequence[str], shape: Shape, verifies: bool, startup: Startup
) -> Runner | None:
    from tandem.runners.native.load_native import load_checkpoint

    own = in_own_format(execution, checkpoint, order)
    threads = own.threads or (own.cores and usable_cores()) or None
    dtype = dtype_name(_number_format(own, checkpoint), "cpu")
    try:
        return load_checkpoint(checkpoint, replace(own, threads=threads), dtype, shape, verifies, startup)
    except NativeUnavailable as error:
        if own.weights in QUANTISED and (own == execution or execution.compile != "auto"):
            raise ValueError(f"weights: {own.weights} needs native steps: {error}") from None
        if execution.compile != "auto":
            raise ValueError(f"compile: native steps are not available: {error}") from None
        if isinstance(error.__cause__, OSError) and not is_installed("torch"):
            raise CheckpointError(str(error)) from error
        need(f"{checkpoint.name} runs without native steps ({error}), and module code", "torch", "transformers")
        if isinstance(error, LibraryMissing):
            log.warning("%s runs several times slower than it could: %s", checkpoint.name, error)
        else:
            log.info("%s runs without native steps: %s", checkpoint.name, error)
        return None
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from None


def _refuse_heads(folder: Path) -> None:
    # a head runs only with its target
    if is_head(folder):
        raise CheckpointError(
            f"{folder}: an EAGLE-3 head, which runs beside its target alone: fused_target --draft_model"
        )
    if is_eagle1(folder):
        raise CheckpointError(f"{folder}: an EAGLE-1 head, which NxD Inference alone serves: fused_target --eagle")


def _order(execution: Execution, shape: Shape, platform: Platform, ranks: int) -> Sequence[str]:
    """The values of --compile to try, best first. Raises ValueError for options that none supports."""
    order = compile_order(execution.compile, platform, ranks)
    if execution.weights in QUANTISED and "native" not in order:
        raise ValueError(f"weights: {execution.weights} runs on the CPU, and the device is {platform.name}")
    options = {
        "batch_buckets": shape.batch_buckets,
        "draft_buckets": shape.draft_buckets,
        "compiled_dir": execution.compiled,
    }
    for name, value in options.items():
        if value and not {"inductor", "neuron"} & set(order):
            raise ValueError(f"{name}: is for graphs, and --compile {execution.compile} makes none here")
    return order


def prepared_platform(execution: Execution) -> Platform:
    """A process's platform. Raises ValueError if it is unavailable or has too few cores."""
    if execution.device != "auto":
        platform = platform_of(execution.device)
    elif execution.cores is None:
        platform = choose_platform("auto")
    else:
        raise ValueError("cores: name the --device whose cores these are")
    ranks = Ranks.from_environment(execution.tp_degree)
    # first: a device query may reserve cores
    platform.prepare(execution.compiled, execution.cores, ranks.rank, ranks.degree)
    platform.require()
    return platform


def in_own_format(execution: Execution, checkpoint: Checkpoint, order: Sequence[str]) -> Execution:
    """Replaces `auto` weights by the checkpoint's own format, if native steps run it. Raises CheckpointError."""
    if execution.weights != "auto" or execution.dtype == "float16" or execution.tp_degree > 1 or "native" not in order:
        return execution
    if (file := checkpoint.gguf_file) and execution.dtype == "auto" and StoredWeights(file).runs_as_stored:
        return replace(execution, weights="as-stored")
    schemes = None if checkpoint.gguf else quantisation_of(configuration_folder(checkpoint))
    is_int8 = schemes is not None and all(scheme.numbers == INT8 for scheme in schemes)
    return replace(execution, weights="int8") if is_int8 else execution


def _number_format(execution: Execution, checkpoint: Checkpoint) -> str:
    # with quantised weights auto is float32: activations are few, and 8 bits already lose enough
    file = checkpoint.gguf_file if execution.weights == "as-stored" else None
    quantised = execution.weights in WHEN_LOADED or (file and StoredWeights(file).formats())
    return "float32" if execution.number_format == "auto" and quantised else execution.number_format


def _load_module(checkpoint: Checkpoint, dtype: Any, platform: Platform, ranks: int) -> Any:
    """Loads a transformers module. Raises CheckpointError."""
    try:
        scaled = checkpoint.gguf is None and quantisation_of(configuration_folder(checkpoint)) is not None
        return _module(checkpoint, dtype, platform, ranks, scaled)
    except CheckpointError:
        raise
    except Exception as error:  # loaders of four formats raise whatever their parsers do
        raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: {first_line(error)}") from error


def _module(checkpoint: Checkpoint, dtype: Any, platform: Platform, ranks: int, scaled: bool) -> Any:
    from tandem.runners.torch.module_checks import refuse_fields
    from tandem.runners.torch.slot_model import load_module, module_from

    if scaled and platform.name == "cpu":
        if ranks > 1:
            raise CheckpointError(f"{checkpoint.folder}: tp_degree: a quantised checkpoint is loaded in one process")
        folder = weights_folder(checkpoint)
        module = module_from(folder, ScaledWeights(folder), dtype)
    else:
        if checkpoint.gguf is None and Path(checkpoint.folder).is_dir() and not scaled:
            check_dense(Path(checkpoint.folder))
        module = load_module(checkpoint.source, dtype, platform.device, sharding(checkpoint.source, ranks))
    if checkpoint.gguf is None:
        refuse_fields(read_configuration(checkpoint), module)
    return module


def end_ids(module: Any) -> tuple[int, ...]:
    """End tokens by the module's classes, for checkpoints without such a file."""
    return ids_of(getattr(module.generation_config, "eos_token_id", None)) or ids_of(module.config.eos_token_id)


def transformers_logging() -> None:
    """Silences transformers' progress bars and advice."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def dtype_name(name: str, device: str) -> str:
    """Resolves auto: bfloat16 if the device multiplies it natively, else float32."""
    if name != "auto":
        return name
    return "bfloat16" if platform_of(device).has_bfloat16() else "float32"


def choose_dtype(name: str, device: str) -> Any:
    """Like `dtype_name`, as torch's dtype."""
    import torch

    return getattr(torch, dtype_name(name, device))


class TorchBackend(Backend):
    """Also runs native steps. Loads models separately, with `Capabilities.fuse` for a pair's graphs."""

    def find(self, model: str | None) -> Checkpoint:
        return find(model)

    def adapter(self, choice: AdapterChoice) -> Adapter:
        return read_adapter(choice)

    def load(self, checkpoint: Checkpoint, request: LoadRequest, startup: Startup) -> Runner:
        more = (request.shape, request.verifies, request.sole_model, startup)
        runner = load_runner(checkpoint, request.execution, *more)
        if request.head is not None:
            from tandem.runners.eagle.load_head import expect_head

            expect_head(request.head, runner)
        return runner

    def is_head(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.gguf is None and is_head(Path(checkpoint.folder))

    def load_head(
        self, checkpoint: Checkpoint, target: Runner | Checkpoint, request: LoadRequest, startup: Startup
    ) -> Runner:
        from tandem.runners.eagle.load_head import load_head, load_remote_head

        if isinstance(target, Checkpoint):
            return load_remote_head(checkpoint, target, request.execution, request.shape, startup)
        return load_head(checkpoint, target, startup, request.execution)


BACKEND = TorchBackend()
