"""Reads a decoder's dimensions from its config.json and counts its parameters, without reading weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DENSE = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix that every layer has. `split`: what tensor parallelism divides (q or kv heads, or columns)."""

    name: str
    inputs: int
    outputs: int
    split: str
    bias: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The dimensions of a dense Llama-like decoder. `converted`: its checkpoint's own quantization, if any.

    `eagle1`: it is an EAGLE-1 head as NxD Inference loads it (`--role convert --convert eagle`).
    """

    name: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    longest: int
    tied: bool
    bias: bool
    converted: Converted | None = None
    eagle1: bool = False

    def linears(self) -> tuple[Linear, ...]:
        q, kv, h, i = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        return (
            Linear("self_attn.q_proj", h, q, "q", self.bias),
            Linear("self_attn.k_proj", h, kv, "kv", self.bias),
            Linear("self_attn.v_proj", h, kv, "kv", self.bias),
            Linear("self_attn.o_proj", q, h, "q", self.bias and self.model_type == "llama"),
            Linear("mlp.gate_proj", h, i, "columns"),
            Linear("mlp.up_proj", h, i, "columns"),
            Linear("mlp.down_proj", i, h, "columns"),
        )

    @property
    def norm_parameters(self) -> int:
        """Parameters of all norms; Qwen3 also normalizes queries and keys. An EAGLE-1 head has one norm."""
        if self.eagle1:
            return self.hidden
        each = 2 * self.hidden + (2 * self.head_dim if self.model_type == "qwen3" else 0)
        return self.layers * each + self.hidden

    @property
    def fc_parameters(self) -> int:
        """Parameters of the matrix by which an EAGLE-1 head reads embedding and hidden state as one input."""
        return 2 * self.hidden * self.hidden if self.eagle1 else 0

    @property
    def parameters(self) -> int:
        """Number of parameters as published: a tied output matrix counts once."""
        each = sum(linear.parameters for linear in self.linears())
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * each + self.fc_parameters + self.norm_parameters + tables


@dataclass(frozen=True, slots=True)
class Converted:
    """A checkpoint's quantization: one byte per weight, except in modules whose names contain these parts."""

    method: str
    except_for: tuple[str, ...]

    def covers(self, module: str) -> bool:
        return not any(part in module for part in self.except_for)


def read_shape(folder: str, field: str) -> DecoderShape:
    """The shape of the model in `folder`; `field` names the flag in errors. Raises ValueError, one line."""
    path, config = read_config(folder, field)
    try:
        return shape_of(config, path.parent.name)
    except ValueError as error:
        raise ValueError(f"{field}: {path}: {error}") from None


def read_config(folder: str, field: str) -> tuple[Path, dict[str, Any]]:
    """The config.json in `folder`, and where it is. Raises ValueError, one line."""
    path = Path(folder)
    path = path if path.name == "config.json" else path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{field}: {path} is not there; a plan reads a model folder's config.json") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field}: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{field}: {path} is not a model's configuration")
    return path, config


def shape_of(config: Mapping[str, Any], name: str) -> DecoderShape:
    """Reads a configuration. Raises ValueError that names the missing or invalid key."""
    kind = config.get("model_type")
    if kind not in DENSE:
        raise ValueError(
            f"model_type: {kind!r} is not one of {', '.join(DENSE)}, the dense decoders that a plan counts"
        )
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    return DecoderShape(
        name=name,
        model_type=kind,
        hidden=hidden,
        intermediate=count(config, "intermediate_size"),
        layers=count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=count(config, "head_dim", hidden // heads),
        vocabulary=count(config, "vocab_size"),
        longest=count(config, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        bias=bool(config.get("attention_bias", False)) or kind == "qwen2",
        converted=_converted(config.get("quantization_config")),
        eagle1="fc_bias" in config,
    )


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size; `default`: where it is absent or null. Raises ValueError."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{key}: is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: {value!r} is not a positive whole number")
    return value


def _converted(config: object) -> Converted | None:
    """The checkpoint's quantization. Raises ValueError for methods other than eight-bit ones."""
    if config is None:
        return None
    if not isinstance(config, dict) or config.get("quant_method") not in ("fbgemm_fp8", "fp8"):
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise ValueError(f"quantization_config.quant_method: {method!r} is not fbgemm_fp8 or fp8")
    return Converted(config["quant_method"], tuple(_names(config)))


def _names(config: Mapping[str, Any]) -> Iterator[str]:
    for name in config.get("modules_to_not_convert") or ():
        if not isinstance(name, str):
            raise ValueError(f"quantization_config.modules_to_not_convert: {name!r} is not a name")
        yield name
