"""Converts GGUF metadata to config.json's words; every key is read or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.checkpoints.family_configs import FULL, MATRICES, SLIDING, FamilyConfig, UnsupportedFamily, family_of, table
from tandem.checkpoints.gguf_blocks import MATRIX_NAMES, StoredWeights

_FOLDER = "module code serves its folder of safetensors, if transformers has the family"
_27B = {"gemma2": 46, "gemma3": 62}  # layers of models with queries scaled by hidden size, which no key says
_CONTROL = 3  # llama.cpp's kind of a token
LONG, SHORT, FREQUENCIES = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"


class _Keys:
    """An architecture's keys; tracks unread ones."""

    def __init__(self, file: StoredWeights, kind: str) -> None:
        self.kind, self._header = kind, file.header
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value. Raises UnsupportedFamily if it differs by layer."""
        key = f"{self.kind}.{name}"
        self._read.add(key)
        if (listed := self._header.lists.get(key)) is None:
            return self._header.values.get(key, default)
        if len(set(listed)) != 1:
            raise UnsupportedFamily(f"{self.kind} with {key} that differs by layer")
        return listed[0]

    def listed(self, name: str) -> Sequence[Any] | None:
        key = f"{self.kind}.{name}"
        self._read.add(key)
        return self._header.lists.get(key)

    def refuse_unread(self) -> None:
        """Raises UnsupportedFamily for unread keys; a 0 has no effect."""
        known = {f"{self.kind}.{name}" for name in table()["gguf"]["ignored"]}
        for key, value in self._header.values.items():
            if key.startswith(f"{self.kind}.") and key not in self._read | known and value not in (0, ""):
                raise UnsupportedFamily(f"{self.kind} with {key}: {value!s:.60}")


def family_of_gguf(file: StoredWeights) -> FamilyConfig:
    made = family_of(config_of_gguf(file))
    family = replace(made.family, norm_offset=0.0)  # the file's weights have it already
    biases = frozenset(name for name in MATRICES if f"blk.0.{MATRIX_NAMES[name]}.bias" in file)
    return replace(made, family=family, biases=biases)


def config_of_gguf(file: StoredWeights) -> dict[str, Any]:
    """Returns the equivalent config.json. Raises UnsupportedFamily."""
    values = file.header.values
    architecture = str(values.get("general.architecture"))
    kinds = {kind.gguf: name for name, kind in table()["native"].items() if kind.gguf}
    if architecture not in kinds:
        raise UnsupportedFamily(
            f"GGUF files of architecture {architecture:.60}{_named(values)} (there are {', '.join(kinds)}): {_FOLDER}"
        )
    keys = _Keys(file, architecture)
    if keys.get("expert_count", 0):
        raise UnsupportedFamily(
            f"GGUF files of {architecture}{_named(values)} with experts ({architecture}.expert_count): {_FOLDER}"
        )
    keys.get("expert_used_count")
    config: dict[str, Any] = {"model_type": kinds[architecture], "tie_word_embeddings": "output.weight" not in file}
    for name, ours in (table()["gguf"]["keys"] | table()["gguf"].get(architecture, {})).items():
        if (value := keys.get(name)) is not None:
            config[ours] = value
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config.setdefault("vocab_size", values.get("tokenizer.ggml.tokens"))
    config |= _heads(keys, config)
    config |= _rotary(file, keys, config)
    if own := _OWN.get(architecture):
        config |= own(keys, config)
    config |= {"eos_token_id": list(_end_ids(file)), "pad_token_id": values.get("tokenizer.ggml.padding_token_id")}
    keys.refuse_unread()
    return config


def _named(values: Mapping[str, Any]) -> str:
    name = values.get("general.name")
    return f" ({name!s:.60})" if name else ""


def _end_ids(file: StoredWeights) -> tuple[int, ...]:
    # Ends of text, turn and message, and llama.cpp's by text. Gemma's `</s>` may be HTML: only if a control token.
    found = [file.header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = file.arrays(*(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type")))
    ends = frozenset(table()["gguf"]["ends"])
    for place, token in enumerate(tokens):
        if token in ends or (token == "</s>" and kinds[place : place + 1] == [_CONTROL]):
            found.append(place)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def _heads(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    size, heads = config.get("head_dim"), config.get("num_attention_heads")
    values = keys.get("attention.value_length")
    if size is None and type(heads) is int and heads > 0 and type(config.get("hidden_size")) is int:
        size = config["hidden_size"] // heads
    if values is not None and values != size:
        raise UnsupportedFamily(f"{keys.kind} with {keys.kind}.attention.value_length {values} beside keys of {size}")
    return {} if size is None else {"head_dim": size}


def _rotary(file: StoredWeights, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0.0)) or 1.0
    original = keys.get("rope.scaling.original_context_length")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base", 10000.0))}
    kind = keys.get("rope.scaling.type", "linear")
    attention = keys.get("rope.scaling.attn_factor")
    part, head = keys.get("rope.dimension_count"), config.get("head_dim")
    if part is not None and head is not None and part != head:
        rope["partial_rotary_factor"] = part / head
    if kind == "longrope" or LONG in file:
        rope |= {"rope_type": "longrope", "long_factor": file.numbers(LONG), "short_factor": file.numbers(SHORT)}
        rope["original_max_position_embeddings"] = original
        if attention is not None:
            rope["attention_factor"] = attention
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        if original is not None:
            rope["original_max_position_embeddings"] = original
        for name, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := keys.get(f"rope.scaling.{name}")) is not None:
                rope[ours] = value
        if (given := keys.get("rope.scaling.yarn_attn_factor", attention)) not in (None, 1.0):
            raise UnsupportedFamily(f"{keys.kind} with {keys.kind}.rope.scaling.yarn_attn_factor: {given}")
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        raise UnsupportedFamily(f"{keys.kind} with {keys.kind}.rope.scaling.type: {kind!s:.60}")
    if FREQUENCIES in file:
        rope["freq_factors"] = file.numbers(FREQUENCIES)
    return {"rope_parameters": rope}


def _windows(usual: int) -> Callable[[_Keys, Mapping[str, Any]], dict[str, Any]]:
    # Windows are listed, or absent in each n-th layer.

    def read(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
        window, layers = keys.get("attention.sliding_window"), int(config["num_hidden_layers"])
        slides = keys.listed("attention.sliding_window_pattern")
        step = usual if slides is not None else keys.get("attention.sliding_window_pattern", usual)
        if not window:
            return {"sliding_window": None}
        slides = slides or [bool((layer + 1) % step) for layer in range(layers)]
        return {"sliding_window": window, "layer_types": [SLIDING if each else FULL for each in slides]}

    return read


def _gemma(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    found = _windows({"gemma2": 2, "gemma3": 6}[keys.kind])(keys, config)
    if keys.kind == "gemma2" and found["sliding_window"] is None:
        found = {"sliding_window": 4096}
    whole = config["num_hidden_layers"] == _27B[keys.kind]
    scaled_by = config["hidden_size"] // config["num_attention_heads"] if whole else config["head_dim"]
    caps = {f"{name}_logit_softcapping": config.get(f"{name}_logit_softcapping") for name in ("attn", "final")}
    base = keys.get("rope.freq_base_swa", 10000.0)
    if keys.kind == "gemma2":
        return {**found, **caps, "query_pre_attn_scalar": scaled_by}
    local = {"rope_type": "default", "rope_theta": float(base)}
    ropes = {FULL: config["rope_parameters"], SLIDING: local}
    return {**found, **caps, "query_pre_attn_scalar": scaled_by, "rope_parameters": ropes}


def _phi3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    keys.get("attention.sliding_window_pattern")
    name = "original_max_position_embeddings"  # of phi3 it has a default beside rope_parameters, which would win
    original = config["rope_parameters"].get(name)
    return {"sliding_window": window or None} | ({} if original is None else {name: original})


def _olmo2(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    # OLMo3 is this with windows; its scaling is of the layers without one.
    found = _windows(4)(keys, config)
    base = keys.get("rope.freq_base_swa", config["rope_parameters"]["rope_theta"])
    if found["sliding_window"] is None:
        return {}
    ropes = {FULL: config["rope_parameters"], SLIDING: {"rope_type": "default", "rope_theta": float(base)}}
    return {**found, "model_type": "olmo3", "rope_parameters": ropes}


def _stablelm(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "use_parallel_residual": bool(keys.get("use_parallel_residual", False)),
        "rope_parameters": {"partial_rotary_factor": 1.0, **rope},
    }


_OWN: Mapping[str, Callable[[_Keys, Mapping[str, Any]], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "stablelm": _stablelm,
}
