"""From a checkpoint to a runner: dtype, device and threads chosen, weights loaded, errors put in one line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.checkpoints import Checkpoint, CheckpointError, first_line, frequent_tokens, weights_revision
from models.gguf_cache import unpacked
from models.runner import Identity, Limits, Runner

log = logging.getLogger("tandem.models")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
COMPILE = ("auto", "native", "off")
CHUNK = 64
SMALL = 50_000_000  # parameters


@dataclass(frozen=True, slots=True)
class Execution:
    """How models run. `threads` None leaves torch's own choice.

    `compile` is where a step's code comes from: "native" is our C++ (CPU), "off" is torch's eager kernels, "auto" is
    the native one where it can be had: it was the fastest (benchmarks/README.md).
    """

    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    compile: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ValueError(f"device: {self.device!r} is not one of {', '.join(DEVICES)}")
        if self.compile not in COMPILE:
            raise ValueError(f"compile: {self.compile!r} is not one of {', '.join(COMPILE)}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads: {self.threads} is below 1")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a server offers: KV slots, tokens per sequence, draft tokens per round."""

    slots: int = 4
    max_length: int = 512
    max_draft: int = 5


def load_runner(checkpoint: Checkpoint, execution: Execution, shape: Shape, verifies: bool = True) -> Runner:
    """Loads a runner. Call it on the device thread. Raises CheckpointError or ValueError, one line each."""
    import torch

    from models.torch_model import load_module

    if execution.threads:
        torch.set_num_threads(execution.threads)
    transformers_logging()
    device = choose_device(execution.device)
    dtype = choose_dtype(execution.dtype, device)
    checkpoint = unpacked(checkpoint)
    try:
        module = load_module(checkpoint.source, dtype, device)
    except CheckpointError:
        raise
    except Exception as error:  # loaders of four formats raise whatever their parsers do
        raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: {first_line(error)}") from error
    limits = Limits(
        shape.slots, shape.max_length, shape.max_draft, min(CHUNK, shape.max_length), int(module.config.vocab_size)
    )
    only = None if verifies else frequent_tokens(checkpoint)
    try:
        return _native(module, checkpoint, execution, limits, verifies, only) or _torch(
            module, checkpoint, device, limits, verifies, only
        )
    except NativeRefused:
        raise
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from None


class NativeRefused(ValueError):
    """Native steps were asked for and cannot be had."""


def _native(
    module: Any,
    checkpoint: Checkpoint,
    execution: Execution,
    limits: Limits,
    verifies: bool,
    only: Sequence[int] | None,
) -> Runner | None:
    """A runner of our C++ steps, or None where they cannot be had and "auto" may do without."""
    import torch

    from models.native.assembly import NotHere, load_native

    if execution.compile == "off" or (execution.compile == "auto" and module.device.type != "cpu"):
        return None
    small = sum(p.numel() for p in module.parameters()) < SMALL
    threads = 1 if small else execution.threads or torch.get_num_threads()
    try:
        return load_native(module, threads, limits, _identity(checkpoint, module, "native"), verifies, only)
    except NotHere as error:
        if execution.compile == "native":
            raise NativeRefused(f"compile: native steps cannot be had: {error}") from None
        log.info("%s runs on torch's eager kernels: no native steps: %s", checkpoint.name, error)
        return None


def _torch(
    module: Any, checkpoint: Checkpoint, device: str, limits: Limits, verifies: bool, only: Sequence[int] | None
) -> Runner:
    from models.torch_model import TorchModel
    from models.torch_runner import TorchRunner

    widest = max(limits.max_draft + 1, limits.chunk)
    model = TorchModel(module, limits.slots, limits.max_length, widest, device, only)
    return TorchRunner(model, limits, _identity(checkpoint, module, "torch"), verifies)


def _identity(checkpoint: Checkpoint, module: Any, backend: str) -> Identity:
    return Identity(
        model_name=checkpoint.name,
        weights_revision=weights_revision(checkpoint),
        dtype=str(module.dtype).removeprefix("torch."),
        device=module.device.type,
        backend=backend,
        end_of_sequence_ids=end_ids(module),
    )


def calm_threads(runner: Runner) -> None:
    """One thread for a small draft model on the CPU, on the calling (device) thread.

    Products this small are no faster on two; and a second thread spins after each, which takes a core away from a
    target on the same machine.
    """
    import torch

    from models.torch_runner import TorchRunner

    if isinstance(runner, TorchRunner) and runner.model.device == "cpu" and runner.model.parameters < SMALL:
        torch.set_num_threads(1)


def transformers_logging() -> None:
    """Progress bars and advice of transformers do not belong into a server's log."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def choose_device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda is not available here (torch finds no CUDA device)")
    return name


def choose_dtype(name: str, device: str):  # type: ignore[no-untyped-def]
    """auto is bfloat16 where the device multiplies it natively, else float32."""
    import torch

    if name != "auto":
        return getattr(torch, name)
    native = torch.cuda.is_bf16_supported() if device == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def end_ids(module) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    eos = getattr(module.generation_config, "eos_token_id", None)
    if eos is None:
        eos = module.config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
