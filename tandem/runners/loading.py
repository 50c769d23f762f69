"""Loads a checkpoint into a runner: chooses dtype, device and threads, reports errors in one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.checkpoints.convert import is_eagle1
from tandem.checkpoints.gguf_cache import unpacked
from tandem.checkpoints.head_config import is_head
from tandem.checkpoints.hub_files import need_torch, read_configuration
from tandem.checkpoints.locate import Checkpoint, CheckpointError, check_sizes
from tandem.host.cores import usable_cores
from tandem.runners.families import check_family
from tandem.runners.making import (
    QUANTISED,
    SMALL,
    WHEN_LOADED,
    RunnerInputs,
    check_dispensable,
    in_own_format,
    load_model,
    made,
    stored_weights,
)
from tandem.runners.native import LibraryMissing, NativeUnavailable
from tandem.runners.protocol import Limits, Runner
from tandem.runners.startup import Startup
from tandem.runners.torch.platforms import DEVICES, Platform, choose_platform, compile_order, platform_of
from tandem.runners.torch.tensor_parallel import Ranks

log = logging.getLogger("tandem.engine")
COMPILE = ("auto", "native", "inductor", "neuron", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "bfloat16", "float32", *QUANTISED)
CHUNK = 64


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
    need_torch(f"{checkpoint.name}: compile {order[0]} on {platform.name}", "transformers")
    with startup.stage("importing"):
        import torch

        import tandem.runners.torch.model  # noqa: F401  (else its import counts as "loading")
    if threads := execution.threads or (execution.cores and platform.packs and usable_cores()):
        torch.set_num_threads(threads)
    elif torch.get_num_threads() > usable_cores() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())  # torch knows no quota of a container
    transformers_logging()
    checkpoint = unpacked(checkpoint)
    with startup.stage("loading"):
        dtype = choose_dtype(execution.number_format, platform.name)
        module = load_model(checkpoint, dtype, platform, ranks)
    parameters = sum(each.numel() for each in module.parameters())
    # a second thread would spin after each small product, taking a core from a target
    if sole_model and platform.packs and execution.threads is None and parameters < SMALL:
        torch.set_num_threads(1)
    chunk, vocab_size = min(shape.chunk, shape.max_length), int(module.config.vocab_size)
    limits = Limits(shape.slots, shape.max_length, shape.max_draft, chunk, vocab_size)
    inputs = RunnerInputs(module, checkpoint, platform, limits, shape, execution, verifies, ranks)
    with startup.stage("packing"):
        return made(inputs, order)


def _load_native(
    checkpoint: Checkpoint, execution: Execution, order: Sequence[str], shape: Shape, verifies: bool, startup: Startup
) -> Runner | None:
    from tandem.runners.native.load import load_checkpoint

    own = in_own_format(execution, checkpoint, order)
    threads = own.threads or (own.cores and usable_cores()) or None
    dtype = dtype_name(_number_format(own, checkpoint), "cpu")
    try:
        return load_checkpoint(checkpoint, replace(own, threads=threads), dtype, shape, verifies, startup)
    except NativeUnavailable as error:
        if own == execution or execution.compile != "auto":
            check_dispensable(own, error)
        need_torch(f"{checkpoint.name} runs without native steps ({error}), and module code", "transformers")
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


def _number_format(execution: Execution, checkpoint: Checkpoint) -> str:
    # with quantised weights auto is float32: activations are few, and 8 bits already lose enough
    stored = stored_weights(checkpoint, execution.weights)
    if execution.number_format != "auto" or not (execution.weights in WHEN_LOADED or (stored and stored.formats())):
        return execution.number_format
    return "float32"


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


def choose_dtype(name: str, device: str):  # type: ignore[no-untyped-def]
    """Like `dtype_name`, as torch's dtype."""
    import torch

    return getattr(torch, dtype_name(name, device))
