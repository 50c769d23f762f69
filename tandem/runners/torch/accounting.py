"""Refuses weights and configuration fields that a transformers module does not use."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from tandem.runners.fits import UnsupportedModel

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
