"""Dimensions of a decoder from config.json, and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.checkpoints.json_files import read_object

DENSE = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class LayerMatrix:
    """A matrix of every layer. `split`: divided by tensor parallelism (q or kv heads, or columns)."""

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
    """A dense Llama-like decoder. `kept`: parts of the names of modules without eight-bit weights; None: all are."""

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
    kept: tuple[str, ...] | None = None
    bytes_each: int = 2

    def eight_bit(self, module: str) -> bool:
        return self.kept is not None and not any(part in module for part in self.kept)

    def matrices(self) -> tuple[LayerMatrix, ...]:
        q, kv, h, i = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        return (
            LayerMatrix("self_attn.q_proj", h, q, "q", self.bias),
            LayerMatrix("self_attn.k_proj", h, kv, "kv", self.bias),
            LayerMatrix("self_attn.v_proj", h, kv, "kv", self.bias),
            LayerMatrix("self_attn.o_proj", q, h, "q", self.bias and self.model_type == "llama"),
            LayerMatrix("mlp.gate_proj", h, i, "columns"),
            LayerMatrix("mlp.up_proj", h, i, "columns"),
            LayerMatrix("mlp.down_proj", i, h, "columns"),
        )

    @property
    def norm_parameters(self) -> int:
        """Qwen3 also normalizes queries and keys."""
        each = 2 * self.hidden + (2 * self.head_dim if self.model_type == "qwen3" else 0)
        return self.layers * each + self.hidden

    @property
    def parameters(self) -> int:
        """As published: a tied output matrix counts once."""
        each = sum(matrix.parameters for matrix in self.matrices())
        tables = self.vocabulary * (1 if self.tied else 2)
        return self.layers * each + self.norm_parameters + tables * self.hidden


def read_shape(folder: str, field: str) -> DecoderShape:
    """The shape of the model in `folder`; `field`: the flag in errors. Raises ValueError, one line."""
    if holds_head(folder):
        raise ValueError(f"{field}: {folder}: an EAGLE head; a plan counts whole models alone")
    path = Path(folder)
    path = path if path.name == "config.json" else path / "config.json"
    try:
        config = read_object(path)
    except OSError:
        raise ValueError(f"{field}: {path} is not there; a plan reads a model folder's config.json") from None
    except ValueError as error:
        raise ValueError(f"{field}: {path} is not a model's configuration: {error}") from None
    try:
        return shape_of(config, path.parent.name)
    except ValueError as error:
        raise ValueError(f"{field}: {path}: {error}") from None


def holds_head(folder: str) -> bool:
    """Whether `folder` has an EAGLE-3 head; False if unreadable, which loading reports."""
    from tandem.checkpoints.head_config import is_head  # lazy: numpy, which --help does not need

    return is_head(Path(folder))


def shape_of(config: Mapping[str, Any], name: str) -> DecoderShape:
    """Reads a configuration. Raises ValueError with the missing or invalid key."""
    kind = config.get("model_type")
    if kind not in DENSE:
        raise ValueError(f"model_type: {kind!r} is not one of {', '.join(DENSE)}, the dense decoders of a plan")
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
    return DecoderShape(
        name=name,
        model_type=kind,
        hidden=hidden,
        intermediate=_count(config, "intermediate_size"),
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_count(config, "head_dim", hidden // heads),
        vocabulary=_count(config, "vocab_size"),
        longest=_count(config, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        bias=bool(config.get("attention_bias", False)) or kind == "qwen2",
        kept=_kept(config.get("quantization_config")),
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size; `default` if absent or null. Raises ValueError."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{key}: is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: {value!r} is not a positive whole number")
    return value


def _kept(config: object) -> tuple[str, ...] | None:
    """Names of an eight-bit checkpoint's other modules. Raises ValueError for another quantization."""
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    if not isinstance(config, dict) or method not in ("fbgemm_fp8", "fp8"):
        raise ValueError(f"quantization_config.quant_method: {method!r} is not fbgemm_fp8 or fp8")
    names = config.get("modules_to_not_convert") or ()
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"quantization_config.modules_to_not_convert: {name!r} is not a name")
    return tuple(names)
