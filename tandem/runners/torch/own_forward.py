"""Checks at every start that a module on the slot cache computes what transformers computes with it alone.

The start checks of the steps compare the steps with each other, so they cannot see that an argument of attention, a
bias or a window is lost on the way. This check can: it runs a few tokens through the module's own forward, with
transformers' attention and masks and no cache, and through slots in two chunkings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.runners.fits import UnsupportedModel
from tandem.runners.torch.kernels import ATTENTION
from tandem.runners.torch.model import TorchModel

HALF = 8  # tokens of a step
WINDOW = 3  # what windows are cut to, so that few tokens reach beyond them
EXACT = (1e-3, 1.0)  # the most that logits may differ by, relative, and at which share of the positions
ROUNDED = (0.1, 0.25)  # in 16 bits a router's near ties send the other positions to other experts


@torch.inference_mode()
def check_own_forward(model: TorchModel) -> None:
    """Raises UnsupportedModel if logits from slots are not those of the module alone."""
    half = max(1, min(HALF, model.slots.length // 2))
    tokens = model.tensor([[(7919 * i + 13) % model.vocab_size for i in range(2 * half)]])
    with _short_windows(model.module, model.slots.length):
        own = _alone(model, tokens)[0]
        whole = _fed(model, [0], tokens, [0])[0]
        _fed(model, [model.spare], tokens[:, :half], [0])
        rows = _fed(model, [0, model.spare], tokens.view(2, half), [0, half])
    most, share = EXACT if model.dtype == torch.float32 else ROUNDED
    for logits, expected in ((whole, own), (rows[0], own[:half]), (rows[1], own[half:])):
        errors = (logits - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        error = float(errors.quantile(share))
        if not error <= most:
            raise UnsupportedModel(
                f"{model.module.config.model_type} does not compute on a slot cache what it computes alone: "
                f"its logits differ by {error:.0%}"
            )
    for slot in (0, model.spare):
        model.slots.clear(slot)


def _fed(model: TorchModel, slots: list[int], tokens: Tensor, starts: list[int]) -> Tensor:
    return TorchModel.forward(model, slots, tokens, model.tensor(starts))


def _alone(model: TorchModel, tokens: Tensor) -> Tensor:
    """Logits of the module's own forward, with transformers' plain attention."""
    model.module.set_attn_implementation("eager")
    try:
        positions = model.columns[None, : tokens.shape[1]]
        logits: Tensor = model.module(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return logits
    finally:
        model.module.set_attn_implementation(ATTENTION)


@contextmanager
def _short_windows(module: Any, length: int) -> Iterator[None]:
    """Cuts sliding windows that are below `length`, for the module's own masks and for attention alike."""
    window = getattr(module.config, "sliding_window", None)
    if not isinstance(window, int) or not WINDOW < window < length:
        yield
        return
    owners = [each for each in (module.config, *module.modules()) if getattr(each, "sliding_window", None) == window]
    for owner in owners:
        owner.sliding_window = WINDOW
    try:
        yield
    finally:
        for owner in owners:
            owner.sliding_window = window
