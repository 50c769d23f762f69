"""Refuses weights, fields and families that module code on a slot cache would run as something else."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tandem.runners.families import UnsupportedModel
from tandem.runners.torch.kernels import ATTENTION
from tandem.runners.torch.slot_model import TorchModel

_SHAPELESS = frozenset(
    """
    architectures auto_map dtype model_type original_max_position_embeddings quantization_config rope_scaling
    rope_theta torch_dtype transformers_version transformers.js_config
    activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout embd_pdrop
    hidden_dropout hidden_dropout_prob resid_pdrop resid_dropout residual_dropout router_jitter_noise
    initializer_factor initializer_range output_router_logits router_aux_loss_coef use_cache
    bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    attention_softmax_in_fp32 gradient_checkpointing inference_runner is_llama_config max_window_layers
    model_max_length n_ctx pretraining_tp reorder_and_upcast_attn scale_attention_softmax_in_fp32
    task_specific_params tie_word_embeddings tokenizer_class torchscript unsloth_fixed unsloth_version
    use_flash_attn use_flash_attention use_flash_attention_2 validate_runner_input
    """.split()  # noqa: SIM905
)  # fields that shape no forward pass, or that transformers reads itself
HALF = 8  # tokens of a step
WINDOW = 3  # what windows are cut to, so that few tokens reach beyond them
EXACT = (1e-3, 1.0)  # the most that logits may differ by, relative, and at which share of the positions
ROUNDED = (0.3, 0.25)  # in 16 bits a router's near ties send the other positions to other experts


def refuse_weights(missing: Collection[str], unused: Collection[str] = (), resized: Collection[str] = ()) -> None:
    """Raises UnsupportedModel for weights that are missing, unused or of other shapes."""
    found = {
        "weights lack": missing,
        "the module has no place for the weights": unused,
        "config.json contradicts the shape of the weights": resized,
    }
    for what, names in found.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UnsupportedModel(f"{what} {', '.join(sorted(names)[:3])}{more}")


def refuse_fields(said: Mapping[str, Any], module: Any) -> None:
    """Raises UnsupportedModel for a field value that neither the family's configuration nor its code names."""
    from transformers import GenerationConfig

    config = type(module.config)
    known = {each.name for each in fields(config)} | {*config.attribute_map, *GenerationConfig().to_dict(), *_SHAPELESS}
    code = "".join(inspect.getsource(sys.modules[each.__module__]) for each in (config, type(module)))
    known |= set(re.findall(r"""(?:config\.|self\.|["'])(\w+)\b""", code))
    for name, value in said.items():
        if value and name not in known and not name.startswith("_"):
            raise UnsupportedModel(f"config.json: {name[:60]}: module code of {config.model_type} does not read it")


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
