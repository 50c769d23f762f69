"""Reads a decoder's config.json with transformers' defaults; refuses unknown fields that may affect inference."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tandem.checkpoints.json_files import an_object, count, data_of, number, read_object

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
ROPE: Mapping[str, Any] = MappingProxyType({"rope_type": "default", "rope_theta": 10000.0})
NO_ROPE = -1


def matrix_name(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj.weight"


class UnsupportedFamily(ValueError):
    """Native steps cannot compute a model; the message names family or field."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of families.json that native steps run.

    `norm`: "rms" or "layer" (LayerNorm with bias); `norm_offset`: added to weights (Gemma: 1); `rounds_once`: only the
    weighted product is rounded (Gemma, OLMo2). `norms_before`, `norms_after`: attention and MLP norm their inputs,
    outputs (Gemma 2, OLMo2). `head_norms`: of queries and keys: "", "head" (weight [head_dim]) or "row" (all heads,
    OLMo2). `wide_rope`: rotation in float32, rounded once (OLMo2). `slides`: every n-th layer has no window, 0: all
    have. `rope_by_type`: windowed layers have another rope; `rope_in_windows`: the others have none. `activation`: its
    field. `gguf`: GGUF's architecture; `turned`: its rows of q and k are in interleaved rotary order.
    """

    defaults: Mapping[str, Any]
    norm: str = "rms"
    norm_offset: float = 0.0
    rounds_once: bool = False
    norms_before: bool = True
    norms_after: bool = False
    head_norms: str = ""
    slides: int = 0
    rope_by_type: bool = False
    rope_in_windows: bool = False
    wide_rope: bool = False
    biases: str = ""
    scaled: bool = False
    activation: str = "hidden_act"
    gguf: str = ""
    turned: bool = False


@dataclass(frozen=True, slots=True)
class FamilyConfig:
    """A model's sizes and formula.

    ropes: transformers' `rope_parameters`, with `freq_factors` [head_dim / 2] of GGUF; rope_of_layer: indices, NO_ROPE
    (SmolLM3); empty: the first. windows: positions visible per layer, own included, 0 for all; empty: all.
    attention_scale None: head_dim ** -0.5. attention_cap, logit_cap: soft caps, 0: none. residual_scale: of what is
    added to the residual stream. parallel: MLP and attention read the same input.
    """

    model_type: str
    family: Family
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
    ropes: tuple[Mapping[str, Any], ...] = (ROPE,)
    rope_of_layer: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    parallel: bool = False
    eos: tuple[int, ...] = field(default=())

    @property
    def norm_names(self) -> dict[str, str]:
        names = {}
        if self.family.norms_before:
            names["before_attention"] = "input_layernorm"
            if not self.parallel:
                names["before_mlp"] = (
                    "pre_feedforward_layernorm" if self.family.norms_after else "post_attention_layernorm"
                )
        if self.family.norms_after:
            names |= {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
        return names

    def shape(self, name: str) -> tuple[int, int]:
        """Returns outputs and inputs of q, k, v, o, gate, up or down."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        outputs = {"q": queries, "k": keys, "v": keys, "gate": self.intermediate_size, "up": self.intermediate_size}
        inputs = {"o": queries, "down": self.intermediate_size}
        return outputs.get(name, self.hidden_size), inputs.get(name, self.hidden_size)

    def rope_of(self, layer: int) -> int:
        return self.rope_of_layer[layer] if self.rope_of_layer else 0

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def parameters(self) -> int:
        """Counts a tied output matrix once."""
        layer = sum(outputs * inputs for outputs, inputs in map(self.shape, MATRICES))
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * self.hidden_size


SLIDING, FULL = "sliding_attention", "full_attention"


@functools.cache
def table() -> Mapping[str, Any]:
    """families.json.

    native: Family by model_type. module: served by module code alone. refused: by reason. fields: known ones of a
    configuration; elsewhere: of training, generation, classes, tokens, files; neutral: values without effect of fields
    that transformers ignores. gguf: keys by config.json's words, keys without effect, texts of tokens that end.
    """
    read = data_of("families")
    return {**read, "native": {name: Family(**row) for name, row in read["native"].items()}}


def read_family(folder: Path) -> FamilyConfig:
    config = read_object(folder / "config.json")
    made = family_of(config)
    parts = [rope.get("partial_rotary_factor", 1.0) for rope in made.ropes]
    if "partial_rotary_factor" not in table()["native"][made.model_type].defaults and parts != [1.0] * len(parts):
        raise UnsupportedFamily(f"models of type {made.model_type} with partial_rotary_factor {parts[0]!r:.60}")
    return made


def family_of(config: Mapping[str, Any]) -> FamilyConfig:
    """Raises UnsupportedFamily, or ValueError naming the field."""
    name = str(config.get("model_type"))
    kinds, fields = table()["native"], table()["fields"]
    if name not in kinds:
        raise UnsupportedFamily(f"models of type {name:.60} (there are {', '.join(kinds)})")
    kind: Family = kinds[name]
    _check_used(name, config, {*fields["sizes"], *fields["common"], *kind.defaults})
    settings = {**kind.defaults, **config}
    sizes = {each: count(each, settings.get(each)) for each in fields["sizes"]}
    heads = sizes["num_attention_heads"]
    keys = settings.get("num_key_value_heads")
    activation = _activation(kind, settings)
    if activation not in ("silu", "gelu", "gelu_pytorch_tanh"):
        raise UnsupportedFamily(f"activation {activation!s:.60}")
    epsilon = "layer_norm_eps" if kind.norm == "layer" else "rms_norm_eps"
    windows = _windows(kind, settings, sizes["num_hidden_layers"])
    embedding_scale = number("embedding_multiplier", settings.get("embedding_multiplier", 1.0))
    made = FamilyConfig(
        model_type=name,
        family=kind,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads if keys is None else count("num_key_value_heads", keys),
        head_dim=_head_dim(settings, sizes["hidden_size"], heads),
        max_position_embeddings=count("max_position_embeddings", settings["max_position_embeddings"]),
        rms_norm_eps=number(epsilon, settings.get(epsilon, 1e-6)),
        hidden_act=activation,
        tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
        biases=_biases(kind, settings),
        ropes=_ropes(kind, settings),
        rope_of_layer=_rope_of_layer(kind, settings, windows, sizes["num_hidden_layers"]),
        windows=windows if any(windows) else (),
        attention_scale=_attention_scale(settings),
        attention_cap=number("attn_logit_softcapping", settings.get("attn_logit_softcapping") or 0.0),
        logit_cap=number("final_logit_softcapping", settings.get("final_logit_softcapping") or 0.0),
        embedding_scale=float(sizes["hidden_size"]) ** 0.5 if kind.scaled else embedding_scale,
        residual_scale=number("residual_multiplier", settings.get("residual_multiplier", 1.0)),
        logit_scale=1 / number("logits_scaling", settings.get("logits_scaling", 1.0)),
        parallel=bool(settings.get("use_parallel_residual")),
        eos=end_ids(settings.get("eos_token_id")),
    )
    if made.num_attention_heads % made.num_key_value_heads:
        raise ValueError(f"num_key_value_heads: {made.num_key_value_heads} do not divide {heads} heads")
    return made


def _head_dim(settings: Mapping[str, Any], hidden_size: int, heads: int) -> int:
    if (given := settings.get("head_dim")) is not None:
        return count("head_dim", given)
    if hidden_size % heads:
        raise ValueError(f"hidden_size: {hidden_size} is not a multiple of {heads} heads")
    return hidden_size // heads


def _attention_scale(settings: Mapping[str, Any]) -> float | None:
    scalar, multiplier = settings.get("query_pre_attn_scalar"), settings.get("attention_multiplier")
    by_scalar = None if scalar is None else number("query_pre_attn_scalar", scalar) ** -0.5
    return by_scalar if multiplier is None else number("attention_multiplier", multiplier)


def _check_used(name: str, config: Mapping[str, Any], used: set[str]) -> None:
    fields = table()["fields"]
    for key, value in config.items():
        apart = key in fields["elsewhere"] or key.startswith("_") or "dropout" in key or key.endswith("pdrop")
        off = value is None or value is False or value == fields["neutral"].get(key)
        if key not in used and not apart and not off:
            raise UnsupportedFamily(f"models of type {name} with {key} {value!r:.60} in their configuration")


def end_ids(value: Any) -> tuple[int, ...]:
    """Parses `eos_token_id`: none, one or several. Raises ValueError."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError(f"eos_token_id: {value!r:.60} is not a token id, or a list of them")
    return ids


def _activation(kind: Family, settings: Mapping[str, Any]) -> Any:
    found = settings.get(kind.activation) or "silu"
    if found == "gelu" and settings["model_type"] == "gemma":  # Gemma's first files mean its tanh approximation
        found = "gelu_pytorch_tanh"
    return {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}.get(found, found)


def _biases(kind: Family, settings: Mapping[str, Any]) -> frozenset[str]:
    of_all = bool(settings.get("attention_bias"))
    with_bias = {*kind.biases, *("qkv" if of_all or settings.get("use_qkv_bias") else "")}
    if settings.get("attention_out_bias", of_all):
        with_bias.add("o")
    return frozenset({*with_bias, *(("gate", "up", "down") if settings.get("mlp_bias") else ())})


def _windows(kind: Family, settings: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    types = settings.get("layer_types")
    if types is None:
        return (0,) * layers if window is None else _by_default(kind, settings, count("sliding_window", window), layers)
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {FULL, SLIDING}:
        raise ValueError(f"layer_types: {types!r:.60} is not a list of names of {layers} layers' attention")
    return tuple(count("sliding_window", window) if window and each == SLIDING else 0 for each in types)


def _by_default(kind: Family, settings: Mapping[str, Any], window: int, layers: int) -> tuple[int, ...]:
    if "no_rope_layers" in settings:
        return tuple(0 if turns else window for turns in _turning(settings, layers))
    first, each = settings.get("max_window_layers", 0), settings.get("sliding_window_pattern", kind.slides)
    if type(each) is not int:
        raise ValueError(f"sliding_window_pattern: {each!r:.60} is not a whole number")
    return tuple(0 if layer < first or (each and (layer + 1) % each == 0) else window for layer in range(layers))


def _turning(settings: Mapping[str, Any], layers: int) -> Sequence[Any]:
    interval = settings.get("no_rope_layer_interval", 4)
    given = settings["no_rope_layers"] or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers:
        raise ValueError(f"no_rope_layers: {given!r:.60} is not a list of {layers} numbers")
    return given


def _rope_of_layer(kind: Family, settings: Mapping[str, Any], windows: Sequence[int], layers: int) -> tuple[int, ...]:
    if kind.rope_by_type:  # the first is that of layers that see all
        types = settings.get("layer_types")
        return tuple(int(each == SLIDING) for each in types) if types else tuple(int(each > 0) for each in windows)
    if "no_rope_layers" in settings:
        return tuple(0 if turns else NO_ROPE for turns in _turning(settings, layers))
    if kind.rope_in_windows and settings.get("sliding_window") is not None:
        return tuple(0 if window else NO_ROPE for window in windows)
    return ()


def _ropes(kind: Family, settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    scaling, given = (an_object(name, settings.get(name) or {}) for name in ("rope_scaling", "rope_parameters"))
    if not kind.rope_by_type:
        return (_rope(settings, scaling or given, settings.get("rope_theta")),)
    if unknown := sorted(given.keys() - {FULL, SLIDING}):
        raise UnsupportedFamily(f"rotary embeddings by layer with {unknown[0]}")
    whole, own = (dict(given.get(name) or {}) for name in (FULL, SLIDING))
    return (
        _rope(settings, {**whole, **scaling}, settings["rope_theta"]),
        _rope(settings, own, settings["rope_local_base_freq"]),
    )


def _rope(settings: Mapping[str, Any], given: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedFamily("rotary embeddings that differ by layer")
    for name, value in given.items():
        if name not in table()["fields"]["rope"] and value is not None and value is not False:
            raise UnsupportedFamily(f"rotary embeddings with {name} {value!r:.60}")
    rope = dict(given)
    rope.setdefault("rope_theta", theta or ROPE["rope_theta"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if settings["model_type"] == "phi3" and rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"  # as transformers reads the first files of Phi-3
    if (part := settings.get("partial_rotary_factor")) is not None:
        rope.setdefault("partial_rotary_factor", part)
    if rope["rope_type"] in ("llama3", "yarn", "longrope", "dynamic"):
        if (own := settings.get("original_max_position_embeddings")) is not None:
            rope["original_max_position_embeddings"] = own
        rope.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
        rope.setdefault(
            "max_position_embeddings", settings["max_position_embeddings"]
        )  # what yarn without a factor reads
    return rope
