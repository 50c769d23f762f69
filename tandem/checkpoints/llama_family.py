"""The configuration of a model of the Llama family, read from config.json or from a GGUF's metadata.

Absent fields have the defaults of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.checkpoints.gguf_header import Header
from tandem.checkpoints.json_files import read_object

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OF_GGUF = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_HEAD_DIM_OF_GGUF = {"llama": "rope.dimension_count", "qwen3": "attention.key_length"}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


class UnsupportedFamily(ValueError):
    """A model is none of the Llama family, or has a field that these do not have; the message names it."""


@dataclass(frozen=True, slots=True)
class FamilyConfig:
    """Sizes and formula of a model. `rope`: as `rope_parameters` of transformers. `eos`: ids that end a sequence.

    `biases`: the matrices that have one.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    biases: frozenset[str] = frozenset()
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    rope: Mapping[str, Any] = field(default_factory=lambda: dict(ROPE))
    eos: tuple[int, ...] = ()

    def shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of the matrix q, k, v, o, gate, up or down of a layer."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        outputs = {"q": queries, "k": keys, "v": keys, "gate": self.intermediate_size, "up": self.intermediate_size}
        inputs = {"o": queries, "down": self.intermediate_size}
        return outputs.get(name, self.hidden_size), inputs.get(name, self.hidden_size)

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normed."""
        return self.model_type == "qwen3"

    @property
    def parameters(self) -> int:
        """The number of weights; a tied output matrix counts once."""
        layer = 2 * self.hidden_size + (2 * self.head_dim if self.has_head_norms else 0)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            outputs, inputs = self.shape(name)
            layer += outputs * inputs + (outputs if name in self.biases else 0)
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * self.hidden_size + self.hidden_size


def read_family(folder: Path) -> FamilyConfig:
    """The configuration in a folder. Raises UnsupportedFamily, ValueError naming the field, or OSError."""
    return family_of(read_object(folder / "config.json"))


def family_of(config: Mapping[str, Any]) -> FamilyConfig:
    """The configuration that config.json says. Raises UnsupportedFamily, or ValueError naming the field."""
    kind = config.get("model_type")
    if kind not in FAMILY:
        raise UnsupportedFamily(f"models of type {kind!s:.60} (there are {', '.join(FAMILY)})")
    said = {**_DEFAULTS[kind], **config}
    sizes = {name: _count(name, said.get(name)) for name in _SIZES}
    heads = sizes["num_attention_heads"]
    keys = said.get("num_key_value_heads")
    head_dim = said.get("head_dim")
    if head_dim is None:
        if sizes["hidden_size"] % heads:
            raise ValueError(f"hidden_size: {sizes['hidden_size']} is not a multiple of {heads} heads")
        head_dim = sizes["hidden_size"] // heads
    activation = said.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedFamily(f"activation {activation!s:.60}")
    made = FamilyConfig(
        model_type=kind,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads if keys is None else _count("num_key_value_heads", keys),
        head_dim=_count("head_dim", head_dim),
        max_position_embeddings=_count("max_position_embeddings", said["max_position_embeddings"]),
        rms_norm_eps=_number("rms_norm_eps", said.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(said.get("tie_word_embeddings", False)),
        biases=_biases(kind, said),
        sliding_window=_window(kind, said),
        layer_types=_layer_types(kind, said, sizes["num_hidden_layers"]),
        rope=_rope(said),
        eos=end_ids(said.get("eos_token_id")),
    )
    if made.num_attention_heads % made.num_key_value_heads:
        raise ValueError(f"num_key_value_heads: {made.num_key_value_heads} do not divide {heads} heads")
    return made


def end_ids(value: Any) -> tuple[int, ...]:
    """The ids that `eos_token_id` names: none, one or several. Raises ValueError."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError(f"eos_token_id: {value!r:.60} is not a token id, or a list of them")
    return ids


def family_of_gguf(header: Header) -> FamilyConfig:
    """The configuration of a GGUF file, as transformers reads it. Raises UnsupportedFamily or ValueError."""
    kind, values = header.values.get("general.architecture"), header.values
    config: dict[str, Any] = {"model_type": kind, "tie_word_embeddings": "output.weight" not in header.tensors}
    for name, ours in _OF_GGUF.items():
        if (value := values.get(f"{kind}.{name}")) is not None:
            config[ours] = value
    head_dim = values.get(f"{kind}.{_HEAD_DIM_OF_GGUF.get(str(kind))}")
    if head_dim is not None:
        config["head_dim"] = head_dim
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config.setdefault("vocab_size", values.get("tokenizer.ggml.tokens"))
    if (end := values.get("tokenizer.ggml.eos_token_id")) is not None:
        config["eos_token_id"] = end
    return family_of(config)


def _biases(kind: str, said: Mapping[str, Any]) -> frozenset[str]:
    if kind == "qwen2":
        return frozenset("qkv")
    if kind == "mistral":
        return frozenset()
    of_mlp = kind == "llama" and said.get("mlp_bias")
    return frozenset({*("qkvo" if said.get("attention_bias") else ""), *(("gate", "up", "down") if of_mlp else ())})


def _window(kind: str, said: Mapping[str, Any]) -> int | None:
    """The sliding window; a Llama has none, and Qwen's is in use only if it says so."""
    window = said.get("sliding_window") if kind == "mistral" or said.get("use_sliding_window") else None
    return None if window is None or kind == "llama" else _count("sliding_window", window)


def _layer_types(kind: str, said: Mapping[str, Any], layers: int) -> tuple[str, ...] | None:
    if not kind.startswith("qwen"):
        return None
    kinds = said.get("layer_types")
    if kinds is None:
        full = layers if _window(kind, said) is None else said.get("max_window_layers", 28)
        return tuple("full_attention" if layer < full else "sliding_attention" for layer in range(layers))
    if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds):
        raise ValueError(f"layer_types: {kinds!r:.60} is not a list of names")
    return tuple(kinds)


def _rope(said: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the rotary embedding, which older files spread over several fields."""
    given = said.get("rope_scaling") or said.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters: {given!r:.60} is not an object")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedFamily("rotary embeddings that differ by layer")
    rope = dict(given)
    rope.setdefault("rope_theta", said.get("rope_theta") or ROPE["rope_theta"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if (part := said.get("partial_rotary_factor")) is not None:
        rope.setdefault("partial_rotary_factor", part)
    if rope["rope_type"] in ("llama3", "yarn"):
        if (own := said.get("original_max_position_embeddings")) is not None:
            rope["original_max_position_embeddings"] = own
        rope.setdefault("original_max_position_embeddings", said["max_position_embeddings"])
        rope.setdefault("max_position_embeddings", said["max_position_embeddings"])  # what yarn without a factor reads
    return rope


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{name}: {value!r:.60} is not a whole number above 0")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: {value!r:.60} is not a number")
    return float(value)
