"""Builds a NativeRunner after checking its logits against the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem.runners.native import NativeUnavailable
from tandem.runners.native.build import CannotBuild, library_path
from tandem.runners.native.library import load_library
from tandem.runners.native.model import NativeModel, NotNative, Threads, check
from tandem.runners.native.runner import NativeRunner
from tandem.runners.protocol import TAIL, Limits, RunnerIdentity
from tandem.runners.torch.model import check_fits

# How far native logits may be from the module's own, relative to their spread. bfloat16 kernels differ among themselves
# by about 0.03; a wrong formula is off by 0.3 and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_PROBE = 12  # tokens


def load_native(
    module: Any, threads: int, limits: Limits, identity: RunnerIdentity, verifies: bool, only: Sequence[int] | None
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
        model = NativeModel(module, pool, limits.slots, length, most_tokens, only)
        check_logits(model, module)
    except (NotNative, CannotBuild, OSError) as error:
        raise NativeUnavailable(str(error)) from None
    return NativeRunner(model, limits, identity, verifies)


@torch.inference_mode()
def check_logits(model: NativeModel, module: Any) -> float:
    """The distance of native logits from the module's, relative to their spread. Raises NotNative if too large."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (1, _PROBE), generator=generator)
    native = model.forward([0], tokens, torch.zeros(1, dtype=torch.int64))[0]
    implementation = module.config._attn_implementation
    module.set_attn_implementation("eager")
    own = module(input_ids=tokens, use_cache=False).logits[0].float()
    module.set_attn_implementation(implementation)
    if model.only is not None:
        own = own[:, torch.from_numpy(model.only).long()]
    distance = float((native - own).norm() / (own - own.mean(-1, keepdim=True)).norm())
    if not distance <= TOLERANCE[model.dtype]:
        raise NotNative(f"the steps' logits are {distance:.3g} away from the model's own")
    return distance
