"""Reads the configuration of a decoder from config.json. Absent fields have the defaults of transformers.

A field that shapes models of any family, and that nothing here used for this one, is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.checkpoints.config_fields import FAMILY, Fields, count, number
from tandem.checkpoints.family import NO_ROPE, ROPE, FamilyConfig, Norms, UnsupportedFamily
from tandem.checkpoints.json_files import read_object

SLIDING, FULL = "sliding_attention", "full_attention"
_KINDS = {FULL, SLIDING}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_family(folder: Path) -> FamilyConfig:
    """The configuration in a folder. Raises UnsupportedFamily, ValueError naming the field, or OSError."""
    return family_of(read_object(folder / "config.json"))


def family_of(config: Mapping[str, Any]) -> FamilyConfig:
    """The configuration that config.json says. Raises UnsupportedFamily, or ValueError naming the field."""
    kind = config.get("model_type")
    if kind not in FAMILY:
        raise UnsupportedFamily(f"models of type {kind!s:.60} (there are {', '.join(FAMILY)})")
    fields = Fields(str(kind), config)
    sizes = {name: fields.whole(name) for name in _SIZES}
    heads, keys, head_dim = sizes["num_attention_heads"], fields.get("num_key_value_heads"), fields.get("head_dim")
    if head_dim is None:
        if sizes["hidden_size"] % heads:
            raise ValueError(f"hidden_size: {sizes['hidden_size']} is not a multiple of {heads} heads")
        head_dim = sizes["hidden_size"] // heads
    activation = fields.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedFamily(f"activation {activation!s:.60}")
    ropes, length = _ropes(fields)
    made = FamilyConfig(
        model_type=str(kind),
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads if keys is None else count("num_key_value_heads", keys),
        head_dim=count("head_dim", head_dim),
        max_position_embeddings=length,
        rms_norm_eps=fields.real("layer_norm_eps" if kind == "stablelm" else "rms_norm_eps", _EPSILON.get(kind, 1e-6)),
        hidden_act=_ACTIVATIONS[activation],
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        biases=_biases(fields),
        norms=_NORMS.get(str(kind), Norms()),
        ropes=ropes,
        windows=_windows(fields, sizes["num_hidden_layers"]),
        eos=end_ids(fields.get("eos_token_id")),
    )
    made = _OWN.get(str(kind), _as_it_is)(made, fields)
    fields.refuse_unread()
    if made.num_attention_heads % made.num_key_value_heads:
        raise ValueError(f"num_key_value_heads: {made.num_key_value_heads} do not divide {heads} heads")
    return made


_EPSILON = {"phi3": 1e-5, "olmo2": 1e-5, "olmo3": 1e-5, "stablelm": 1e-5}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATIONS |= {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_AFTER = Norms(rounds_once=True, before=False, after=True, heads="row")
_NORMS: Mapping[str, Norms] = {
    "qwen3": Norms(heads="head"),
    "gemma": Norms(offset=1.0, rounds_once=True),
    "gemma2": Norms(offset=1.0, rounds_once=True, after=True),
    "gemma3_text": Norms(offset=1.0, rounds_once=True, after=True, heads="head"),
    "olmo2": _AFTER,
    "olmo3": _AFTER,
    "stablelm": Norms(kind="layer"),
}


def _as_it_is(made: FamilyConfig, fields: Fields) -> FamilyConfig:
    return made


def _gemma(made: FamilyConfig, fields: Fields) -> FamilyConfig:
    """Gemma's scales and soft caps. The embedding's factor is rounded to the weights' dtype by whoever multiplies."""
    if fields.get("use_bidirectional_attention") not in (None, False):
        raise UnsupportedFamily(f"{fields.kind} with use_bidirectional_attention")
    scale = None if fields.kind == "gemma" else fields.real("query_pre_attn_scalar", 256.0) ** -0.5
    attention, logits = (fields.get(f"{name}_logit_softcapping") for name in ("attn", "final"))
    return replace(
        made,
        attention_scale=scale,
        embedding_scale=math.sqrt(made.hidden_size),
        attention_cap=0.0 if attention is None else number("attn_logit_softcapping", attention),
        logit_cap=0.0 if logits is None else number("final_logit_softcapping", logits),
    )


def _granite(made: FamilyConfig, fields: Fields) -> FamilyConfig:
    return replace(
        made,
        attention_scale=fields.real("attention_multiplier", 1.0),
        embedding_scale=fields.real("embedding_multiplier", 1.0),
        residual_scale=fields.real("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.real("logits_scaling", 1.0),
    )


def _smollm3(made: FamilyConfig, fields: Fields) -> FamilyConfig:
    """Every fourth layer has no rotary embedding, unless the file says which."""
    layers, step = made.num_hidden_layers, fields.whole("no_rope_layer_interval")
    given = fields.get("no_rope_layers") or [int((layer + 1) % step != 0) for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers or not set(given) <= {0, 1}:
        raise ValueError(f"no_rope_layers: {given!r:.60} is not a list of 0 and 1 for {layers} layers")
    return replace(made, rope_of_layer=tuple(0 if each else NO_ROPE for each in given))


def _by_kind(made: FamilyConfig, fields: Fields) -> FamilyConfig:
    """Layers with a window have a rotary embedding of their own, where there are two."""
    if len(made.ropes) == 1:
        return made
    return replace(made, rope_of_layer=tuple(int(bool(window)) for window in made.windows))


def _stablelm(made: FamilyConfig, fields: Fields) -> FamilyConfig:
    for name in ("qk_layernorm", "use_parallel_residual"):
        if fields.get(name):
            raise UnsupportedFamily(f"stablelm with {name}")
    return made


_OWN: Mapping[str, Callable[[FamilyConfig, Fields], FamilyConfig]] = {
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": lambda made, fields: _by_kind(_gemma(made, fields), fields),
    "granite": _granite,
    "olmo3": _by_kind,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
}


def end_ids(value: Any) -> tuple[int, ...]:
    """The ids that `eos_token_id` names: none, one or several. Raises ValueError."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError(f"eos_token_id: {value!r:.60} is not a token id, or a list of them")
    return ids


def _biases(fields: Fields) -> frozenset[str]:
    kind = fields.kind
    if kind == "qwen2":
        return frozenset("qkv")
    if kind == "mistral" or kind == "phi3":
        return frozenset()
    if kind == "stablelm":
        return frozenset("qkv" if fields.get("use_qkv_bias") else "")
    of_attention = fields.get("attention_bias")
    of_output = fields.get("attention_out_bias") if kind == "seed_oss" else of_attention
    of_mlp = kind in ("llama", "granite", "smollm3", "seed_oss") and fields.get("mlp_bias")
    names = ("gate", "up", "down") if of_mlp else ()
    return frozenset({*("qkv" if of_attention else ""), *("o" if of_output else ""), *names})


_ALL_SLIDE = ("mistral", "phi3")  # with a window, and no list of layers
_IF_ASKED = ("qwen2", "qwen3", "smollm3")  # whose window is in use only if they say so


def _windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 where it sees all; () if all do."""
    kind = fields.kind
    window = (
        fields.get("sliding_window") if kind in (*_ALL_SLIDE, *_IF_ASKED, "gemma2", "gemma3_text", "olmo3") else None
    )
    if kind in _IF_ASKED and not fields.get("use_sliding_window"):
        fields.get("max_window_layers"), fields.get("layer_types")
        return ()
    if window is None:
        fields.get("layer_types")
        return ()
    window = count("sliding_window", window)
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if slides else FULL for slides in _usual(fields, layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= _KINDS:
        raise ValueError(f"layer_types: {kinds!r:.60} is not a list of names of {layers} layers' attention")
    return tuple(window if each == SLIDING else 0 for each in kinds)


def _usual(fields: Fields, layers: int) -> list[bool]:
    """Which layers have a window where the file does not list them."""
    kind = fields.kind
    if kind in _ALL_SLIDE:
        return [True] * layers
    if kind.startswith("qwen"):
        full = fields.get("max_window_layers", 28)
        return [layer >= full for layer in range(layers)]
    if kind == "smollm3":
        rope = fields.get("no_rope_layers") or [
            int((n + 1) % fields.whole("no_rope_layer_interval")) for n in range(layers)
        ]
        return [not each for each in rope]
    usual = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}[kind]
    step = count(
        "sliding_window_pattern", fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", usual))
    )
    return [bool((layer + 1) % step) for layer in range(layers)]


def _ropes(fields: Fields) -> tuple[tuple[dict[str, Any], ...], int]:
    """The rotary embeddings, of layers with a window second if there are two; and the positions that they reach."""
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        said = fields.get(name) or {}
        if not isinstance(said, Mapping):
            raise ValueError(f"{name}: {said!r:.60} is not an object")
        given |= said
    if any(isinstance(value, Mapping) for value in given.values()):
        if fields.kind not in ("gemma3_text", "olmo3") or not set(given) <= _KINDS:
            raise UnsupportedFamily("rotary embeddings that differ by layer")
        found = [_rope(fields, given.get(kind) or {}) for kind in (FULL, SLIDING)]
    elif fields.kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": fields.real("rope_local_base_freq", 10000.0)}
        found = [_rope(fields, given), local]
    elif fields.kind == "olmo3":  # scaling is of the layers without a window
        plain = {"rope_type": "default", "rope_theta": given.get("rope_theta") or fields.get("rope_theta") or 10000.0}
        found = [_rope(fields, given), plain]
    else:
        found = [_rope(fields, given)]
    return tuple(dict(each) for each in found), _positions(fields, found[0])


def _positions(fields: Fields, rope: Mapping[str, Any]) -> int:
    """How many positions the scaling reaches: that of YaRN and of NTK counts from the original context."""
    positions = fields.whole("max_position_embeddings")
    factor = rope.get("factor")
    if rope["rope_type"] in ("yarn", "dynamic") and isinstance(factor, int | float) and math.isfinite(factor):
        return max(positions, int(float(rope.get("original_max_position_embeddings", positions)) * factor))
    return positions


def _rope(fields: Fields, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of one rotary embedding, which older files spread over several fields."""
    rope = dict(given)
    rope.setdefault("rope_theta", fields.get("rope_theta") or ROPE["rope_theta"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] == "su":  # what Phi-3's first files called it
        rope["rope_type"] = "longrope"
    part = fields.get("partial_rotary_factor")
    if part is not None and fields.kind in ("stablelm", "phi3"):
        rope.setdefault("partial_rotary_factor", part)
    own = fields.get("original_max_position_embeddings")
    if rope["rope_type"] in ("llama3", "yarn", "longrope", "dynamic"):
        positions = fields.get("max_position_embeddings")
        if own is not None:
            rope["original_max_position_embeddings"] = own
        rope.setdefault("original_max_position_embeddings", positions)
        rope.setdefault("max_position_embeddings", positions)  # what yarn without a factor reads
    return rope
