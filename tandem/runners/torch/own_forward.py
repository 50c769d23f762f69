"""Checks at startup that a module computes the same on a slot cache and alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.runners.fits import UnsupportedModel
from tandem.runners.torch.kernels import ATTENTION
from tandem.runners.torch.model import TorchModel

HALF = 8  # tokens of a step
WINDOW = 3  # what windows are cut to, so that few tokens reach beyond them
EXACT = (1e-3, 1.0)  # the most that logits may differ by, relative, and at which share of the positions
ROUNDED = (0.3, 0.25)  # in 16 bits a router's near ties send the other positions to other experts


@torch.inference_mode()
def check_own_forward(model: TorchModel) -> None:
    """Raises UnsupportedModel if logits from slots, in two chunkings, differ from the module's own forward."""
    half, module = max(1, min(HALF, model.slots.length // 2)), model.module
    tokens = model.tensor([[(7919 * i + 13) % model.vocab_size for i in range(2 * half)]])
    window = getattr(module.config, "sliding_window", None)
    cut = isinstance(window, int) and WINDOW < window < model.slots.length
    owners = [each for each in (module.config, *module.modules()) if cut and vars(each).get("sliding_window") == window]
    try:
        for owner in owners:
            owner.sliding_window = WINDOW
        own = _alone(model, tokens)
        whole = _fed(model, [0], tokens, [0])[0]
        _fed(model, [model.spare], tokens[:, :half], [0])
        rows = _fed(model, [0, model.spare], tokens.view(2, half), [0, half])
    finally:
        for owner in owners:
            owner.sliding_window = window
    most, share = EXACT if model.dtype == torch.float32 else ROUNDED
    for logits, expected in ((whole, own), (rows[0], own[:half]), (rows[1], own[half:])):
        errors = (logits - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
        if not (error := float(errors.quantile(share))) <= most:
            differ = f"does not compute on a slot cache what it computes alone: its logits differ by {error:.0%}"
            raise UnsupportedModel(f"{module.config.model_type} {differ}")
    for slot in (0, model.spare):
        model.slots.clear(slot)


def _fed(model: TorchModel, slots: list[int], tokens: Tensor, starts: list[int]) -> Tensor:
    return TorchModel.forward(model, slots, tokens, model.tensor(starts))


def _alone(model: TorchModel, tokens: Tensor) -> Any:
    """Logits with transformers' own attention and masks, without a cache."""
    model.module.set_attn_implementation("eager")
    try:
        positions = model.columns[None, : tokens.shape[1]]
        return model.module(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
    finally:
        model.module.set_attn_implementation(ATTENTION)
