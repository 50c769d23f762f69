"""Reads the configuration of a model of the Llama family from config.json.

Absent fields have the defaults of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.checkpoints.family import ROPE, FamilyConfig, Norms, UnsupportedFamily
from tandem.checkpoints.json_files import read_object

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
_KINDS = {"full_attention", "sliding_attention"}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


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
        norms=Norms(heads="head" if kind == "qwen3" else ""),
        ropes=(_rope(said),),
        windows=_windows(kind, said, sizes["num_hidden_layers"]),
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


def _windows(kind: str, said: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = _window(kind, said)
    if window is None:
        return ()
    if kind == "mistral":
        return (window,) * layers
    kinds = said.get("layer_types")
    if kinds is None:
        full = said.get("max_window_layers", 28)
        return tuple(0 if layer < full else window for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= _KINDS:
        raise ValueError(f"layer_types: {kinds!r:.60} is not a list of names of {layers} layers' attention")
    return tuple(window if each == "sliding_attention" else 0 for each in kinds)


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
