"""What the folder of an EAGLE-1 head holds: as published, and as NxD Inference loads it.

A head is one decoder layer and `fc`, which makes one input of an embedding and a hidden state of the target, after the
target's last norm. It has no norm of its own before attention (a few have) and none at its end. A published folder has
no output matrix; NxD Inference wants the target's in it (`--role convert --convert eagle`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.tensors import Tensors

FC, OUTPUT, EMBEDDING = "fc.weight", "lm_head.weight", "embed_tokens.weight"
INPUT_NORM = "layers.0.input_layernorm.weight"
_OPTIONAL = {FC.replace("weight", "bias"), OUTPUT, EMBEDDING, INPUT_NORM}


@dataclass(frozen=True, slots=True)
class Eagle1Config:
    """The fields of a head's config.json that shapes follow from."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that a head may have, by name; biases of the layer aside."""
        h, i, vocabulary = self.hidden_size, self.intermediate_size, self.vocab_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (i, h),
            "mlp.up_proj": (i, h),
            "mlp.down_proj": (h, i),
            "post_attention_layernorm": (h,),
            "input_layernorm": (h,),
        }
        whole = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
        tables = {EMBEDDING: (vocabulary, h), OUTPUT: (vocabulary, h)}
        return {FC: (h, 2 * h), FC.replace("weight", "bias"): (h,), **whole, **tables}


def is_eagle1(folder: Path) -> bool:
    """Whether a folder's config.json is that of an EAGLE-1 head that was trained or grafted here."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "fc_bias" in config


def read_eagle1_config(folder: Path) -> Eagle1Config:
    """Reads config.json. Raises CheckpointError that names the field."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if config.get("num_hidden_layers", 1) != 1:
            raise CheckpointError(f"{file}: num_hidden_layers: {config['num_hidden_layers']!r} is not 1")
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        return Eagle1Config(
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=_size(config, "num_key_value_heads", heads),
            head_dim=_size(config, "head_dim", hidden // heads),
            vocab_size=_size(config, "vocab_size"),
        )
    except (OSError, AttributeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{file}: {error}") from None


def _size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: {value!r} is not a number above 0")
    return value


def check_eagle1(folder: Path, tensors: Tensors) -> Eagle1Config:
    """The head's sizes, if its tensors are those of an EAGLE-1 head and fit them. Raises CheckpointError by name."""
    names = {plain(name): name for name in tensors.files}
    if FC not in names:
        raise CheckpointError(f"{folder}: no {FC}: not an EAGLE-1 head")
    config = read_eagle1_config(folder)
    shapes = config.shapes()
    if missing := sorted(set(shapes) - set(names) - _OPTIONAL):
        raise CheckpointError(f"{folder}: the head lacks {', '.join(missing[:3])}")
    if unknown := sorted(name for name in names if name not in shapes and not _is_bias(name)):
        raise CheckpointError(f"{folder}: the head has {', '.join(unknown[:3])}, which EAGLE-1 heads do not have")
    for name in sorted(set(names) & set(shapes)):
        found = tensors.shape(names[name])
        if found != shapes[name]:
            raise CheckpointError(f"{folder}: {name} is {list(found)}, not {list(shapes[name])} as config.json has it")
    return config


def plain(name: str) -> str:
    """A tensor's name as published heads have it."""
    return name.removeprefix("model.")


def _is_bias(name: str) -> bool:
    return name.startswith("layers.0.self_attn.") and name.endswith("_proj.bias")


def check_grafted(folder: Path, hidden_size: int | None, vocab_size: int, normed_inputs: bool) -> None:
    """Raises CheckpointError unless the folder has what NxD Inference loads beside a target of these sizes.

    hidden_size: the target's; None: not known. normed_inputs: `enable_eagle_draft_input_norm`.
    """
    tensors = Tensors(folder)
    config = check_eagle1(folder, tensors)
    names = {plain(name) for name in tensors.files}
    for table in (OUTPUT, EMBEDDING):
        if table not in names:
            raise CheckpointError(f"{folder}: no {table}; --role convert --convert eagle takes it from the target")
    sizes = (("hidden_size", config.hidden_size, hidden_size), ("vocab_size", config.vocab_size, vocab_size))
    for field, own, wanted in sizes:
        if wanted is not None and own != wanted:
            raise CheckpointError(f"{folder}: {field}: {own}, and the target's is {wanted}")
    if normed_inputs != (INPUT_NORM in names):
        has, flag = ("has no", "false") if normed_inputs else ("has", "true")
        raise CheckpointError(
            f"{folder}: the head {has} {INPUT_NORM}: set enable_eagle_draft_input_norm to {flag} in --neuron_config"
        )
