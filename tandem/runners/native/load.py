"""Builds a NativeRunner after checking its logits against the module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tandem.runners.native import NativeUnavailable
from tandem.runners.native.build import CannotBuild, library_path
from tandem.runners.native.library import load_library
from tandem.runners.native.model import NativeModel, check
from tandem.runners.native.reference import PARTS, as_packed, products
from tandem.runners.native.runner import NativeRunner
from tandem.runners.native.steps import NotNative, Threads
from tandem.runners.native.weights import UNQUANTISED, Packing
from tandem.runners.protocol import TAIL, Limits, RunnerIdentity
from tandem.runners.torch.model import check_fits

# How far native logits may be from the module's own, relative to their spread. bfloat16 kernels differ among themselves
# by about 0.03; a wrong formula is off by 0.3 and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# With activations in 8 bits the last bits of a sum may decide between two numbers, and one such difference makes others
# in every matrix behind it: 30 layers are 0.1 apart in float32 and 0.18 in bfloat16. So the whole is held to this, and
# each packed matrix alone, whose input is the same on both sides, to what the last additions round.
QUANTISED = 0.25
PRODUCT = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
_PROBE = 12  # tokens


def load_native(
    module: Any,
    threads: int,
    limits: Limits,
    identity: RunnerIdentity,
    verifies: bool,
    draft_vocab: Sequence[int] | None,
    packing: Packing = UNQUANTISED,
) -> NativeRunner:
    """Compiles the library if necessary, packs the weights, checks the logits. Raises NativeUnavailable."""
    try:
        if module.device.type != "cpu":
            raise NotNative(f"device {module.device.type}")
        check(module)
        check_fits(module.config, limits.max_length)
        length = limits.max_length + max(limits.max_draft + 1, limits.chunk)
        most_tokens = limits.slots * max(limits.max_draft + 1, TAIL, 1) + limits.chunk
        pool = Threads(load_library(library_path()), threads)
        model = NativeModel(module, pool, limits.slots, length, most_tokens, draft_vocab, packing)
        if packing.quantises:
            check_products(model, module, packing)
        check_logits(model, module, packing)
    except (NotNative, CannotBuild, OSError) as error:
        raise NativeUnavailable(str(error)) from None
    return NativeRunner(model, limits, identity, verifies)


@torch.inference_mode()
def check_logits(model: NativeModel, module: Any, packing: Packing = UNQUANTISED) -> float:
    """The distance of native logits from the module's, relative to their spread.

    Raises NotNative if it is above what the dtype allows.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (1, _PROBE), generator=generator)
    native = model.forward([0], tokens, torch.zeros(1, dtype=torch.int64))[0]
    with _plainly(module), as_packed(module, packing, model.library):
        own = module(input_ids=tokens, use_cache=False).logits[0].float()
    if model.draft_vocab is not None:
        own = own[:, torch.from_numpy(model.draft_vocab).long()]
    distance = float((native - own).norm() / (own - own.mean(-1, keepdim=True)).norm())
    if not distance <= (QUANTISED if packing.quantises else TOLERANCE[model.dtype]):
        raise NotNative(f"the steps' logits are {distance:.3g} away from the model's own")
    return distance


@torch.inference_mode()
def check_products(model: NativeModel, module: Any, packing: Packing) -> float:
    """The largest distance of a packed matrix's products from those of its weights, relative to their size.

    Raises NotNative if it is above what rounding explains.
    """
    largest, wanted = 0.0, None if model.draft_vocab is None else model.draft_vocab.tolist()
    with _plainly(module):
        for layer, part, x, own in products(module, packing, model.library, wanted):
            off, size = float((model.product(layer, part, x, own.shape[1]) - own).norm()), float(own.norm())
            if not off <= PRODUCT[model.dtype] * size:
                where = "the head" if layer < 0 else f"{', '.join(PARTS[part])} of layer {layer}"
                raise NotNative(f"products of {where} are {off / max(size, 1e-30):.3g} away from those of its weights")
            largest = max(largest, off / max(size, 1e-30))
    return largest


@contextlib.contextmanager
def _plainly(module: Any) -> Iterator[None]:
    """Runs the module as transformers has it, on one thread."""
    implementation = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with one_thread():
            yield
    finally:
        module.set_attn_implementation(implementation)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch to one thread: a second would wait after each operation, if others use the machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
