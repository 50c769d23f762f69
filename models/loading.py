"""From a checkpoint to a runner: dtype, device and threads chosen, weights loaded, errors put in one line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.checkpoints import Checkpoint, CheckpointError, first_line, frequent_tokens, weights_revision
from models.gguf_cache import unpacked
from models.native import NotHere
from models.runner import TAIL, Identity, Limits, Runner
from models.startup import Startup

Only = Sequence[int] | None  # the tokens that a draft model's head knows
log = logging.getLogger("tandem.models")
COMPILE = ("auto", "native", "inductor", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
CHUNK = 64
SMALL = 50_000_000  # parameters


@dataclass(frozen=True, slots=True)
class Execution:
    """How models run. `threads` None leaves torch's own choice.

    `compile` is where a step's code comes from: "native" is our C++ (CPU), "inductor" makes graphs of torch's modules,
    "off" runs these as they are; "auto" is native where it can be had (the fastest, benchmarks/README.md), graphs on
    CUDA, else off. `exact`: where kernels differ in their last bits, only one shape is used; else all are, and
    GetModelInfo says bit_exact false.
    """

    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    compile: str = "auto"
    exact: bool = True

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


def load_runner(
    checkpoint: Checkpoint,
    execution: Execution,
    shape: Shape,
    verifies: bool = True,
    alone: bool = False,
    startup: Startup | None = None,
) -> Runner:
    """Loads a torch runner. Call it on the device thread. Raises CheckpointError or ValueError, one line each.

    `alone`: a small model then takes one thread on the CPU. Products this small are no faster on two; and a second
    thread spins after each, which takes a core away from a target on the same machine.
    """
    startup = startup or Startup()
    with startup.stage("importing"):
        import torch

        import models.torch_model  # noqa: F401  (what takes long in "loading" otherwise)

    if execution.threads:
        torch.set_num_threads(execution.threads)
    transformers_logging()
    device = choose_device(execution.device)
    dtype = choose_dtype(execution.dtype, device)
    checkpoint = unpacked(checkpoint)
    with startup.stage("loading"):
        module = _module(checkpoint, dtype, device)
    small = sum(p.numel() for p in module.parameters()) < SMALL
    if alone and small and device == "cpu" and execution.threads is None:
        torch.set_num_threads(1)
    limits = Limits(
        shape.slots, shape.max_length, shape.max_draft, min(CHUNK, shape.max_length), int(module.config.vocab_size)
    )
    only = None if verifies else frequent_tokens(checkpoint)
    with startup.stage("packing"):
        try:
            for how in ways(execution.compile, device):
                try:
                    return _RUNNERS[how](module, checkpoint, limits, execution, verifies, only)
                except NotHere as error:
                    if execution.compile != "auto":
                        raise NativeRefused(f"compile: native steps cannot be had: {error}") from None
                    log.info("%s runs without native steps: %s", checkpoint.name, error)
        except NativeRefused:
            raise
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from None
    raise AssertionError("the last way always works")


def _module(checkpoint: Checkpoint, dtype: Any, device: str) -> Any:
    from models.torch_model import load_module

    try:
        return load_module(checkpoint.source, dtype, device)
    except CheckpointError:
        raise
    except Exception as error:  # loaders of four formats raise whatever their parsers do
        raise CheckpointError(f"{checkpoint.folder}: cannot be loaded: {first_line(error)}") from error


class NativeRefused(ValueError):
    """Native steps were asked for and cannot be had."""


def ways(compile: str, device: str) -> tuple[str, ...]:
    """What may run the steps, the best first. The default is what measured fastest (benchmarks/README.md)."""
    if compile != "auto":
        return (compile,)
    return ("inductor",) if device == "cuda" else ("native", "off")


def _native(
    module: Any, checkpoint: Checkpoint, limits: Limits, execution: Execution, verifies: bool, only: Only
) -> Runner:
    import torch

    from models.native.assembly import load_native

    small = sum(p.numel() for p in module.parameters()) < SMALL
    threads = 1 if small else execution.threads or torch.get_num_threads()
    return load_native(module, threads, limits, _identity(checkpoint, module, "native"), verifies, only)


def _off(
    module: Any, checkpoint: Checkpoint, limits: Limits, execution: Execution, verifies: bool, only: Only
) -> Runner:
    from models.torch_model import TorchModel
    from models.torch_runner import TorchRunner

    widest = max(limits.max_draft + 1, limits.chunk, TAIL)
    model = TorchModel(module, limits.slots, limits.max_length, widest, module.device.type, only)
    return TorchRunner(model, limits, _identity(checkpoint, module, "torch"), verifies, execution.exact)


def _inductor(
    module: Any, checkpoint: Checkpoint, limits: Limits, execution: Execution, verifies: bool, only: Only
) -> Runner:
    from models.compiled_model import CompiledModel
    from models.compiled_runner import CompiledRunner
    from models.makers import makers

    widest, identity = max(limits.max_draft + 1, limits.chunk, TAIL), _identity(checkpoint, module, "torch")
    compiled = CompiledModel(module, limits.slots, limits.max_length, widest, identity.device, only)
    return CompiledRunner(compiled, limits, identity, makers(identity, limits, only), verifies, execution.exact)


_RUNNERS = {"native": _native, "off": _off, "inductor": _inductor}


def _identity(checkpoint: Checkpoint, module: Any, backend: str) -> Identity:
    return Identity(
        model_name=checkpoint.name,
        weights_revision=weights_revision(checkpoint),
        dtype=str(module.dtype).removeprefix("torch."),
        device=module.device.type,
        backend=backend,
        end_of_sequence_ids=end_ids(module),
    )


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
