"""EAGLE-3 heads' config.json in SpecForge's layout (SGLang, vLLM), and as `speculators` (vLLM) writes it; tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.checkpoints.json_files import count, read_object
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.numbers import DTYPES, Stored
from tandem.checkpoints.tensors import Tensors

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
TAPS = 3  # hidden states that a head reads: of a low, a middle and a high layer
LAYERS = "eagle_aux_hidden_state_layer_ids"
_WRITTEN = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias"),
    *("rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size", "target_hidden_size"),
    "norm_before_residual",
)
FC, OUTPUT, EMBEDDING = "fc.weight", "lm_head.weight", "embed_tokens.weight"
MAPS = ("d2t", "t2d")
LINEARS = {
    **{name: f"midlayer.self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")},
}
NORMS = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """`layers`: target layers read; None: `default_layers`. `norm_before_residual`: the residual starts normed."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    attention_bias: bool = False
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})

    def __post_init__(self) -> None:
        for name in (
            *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
            *("vocab_size", "draft_vocab_size", "target_hidden_size"),
        ):
            count(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_key_value_heads} do not divide {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size: {self.draft_vocab_size} is above vocab_size {self.vocab_size}")
        layers = self.layers
        if layers is not None and (len(layers) != TAPS or not all(type(each) is int and each > 0 for each in layers)):
            raise ValueError(f"{LAYERS}: {list(layers)!r:.60} are not {TAPS} layers, counted from 1")

    def taps(self, target_layers: int) -> tuple[int, ...]:
        """Returns the layers after which features are taken. Raises ValueError for a small target."""
        layers = default_layers(target_layers) if self.layers is None else self.layers
        if max(layers) > target_layers:
            raise ValueError(f"{LAYERS}: {list(layers)} go beyond the target's {target_layers} layers")
        return layers


def default_layers(target_layers: int) -> tuple[int, ...]:
    """Returns the defaults of vLLM and SGLang; all layers of a very small target."""
    high = target_layers - 3 if target_layers > 5 else target_layers
    return (min(2, target_layers), max(1, target_layers // 2), high)


def is_head(folder: Path) -> bool:
    try:
        return _is_head(read_object(folder / "config.json"))
    except (OSError, ValueError):
        return False


def _is_head(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    named = isinstance(architectures, list) and any(name in ARCHITECTURES for name in architectures)
    return named or config.get("speculators_model_type") == "eagle3"


def read_head_config(folder: Path, eagle1: bool = False) -> HeadConfig:
    """Reads either layout, or EAGLE-1's one-layer Llama. Raises CheckpointError."""
    file = folder / "config.json"
    try:
        config = read_object(file)
        if not eagle1 and not _is_head(config):
            raise ValueError("not the configuration of an EAGLE-3 head")
        return _parsed(config)
    except OSError:
        raise CheckpointError(f"{file}: missing, so {folder} is not a head's folder") from None
    except KeyError as error:
        raise CheckpointError(f"{file}: {error.args[0]} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: {error}") from None


def _parsed(config: Mapping[str, Any]) -> HeadConfig:
    layer = config.get("transformer_layer_config")
    speculators = layer is not None
    own: Mapping[str, Any] = layer if layer is not None else config
    for name, wanted in (("num_hidden_layers", 1), ("hidden_act", "silu"), ("model_type", "llama")):
        if own.get(name, wanted) != wanted:
            raise ValueError(f"{name}: {own[name]!r:.60} is not supported, only {wanted!r}")
    hidden, heads = own["hidden_size"], own["num_attention_heads"]
    return HeadConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=own.get("num_key_value_heads") or heads,
        head_dim=own.get("head_dim") or (hidden // heads if heads else 0),
        intermediate_size=own["intermediate_size"],
        vocab_size=own["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or own["vocab_size"],
        target_hidden_size=config.get("target_hidden_size") or hidden,
        layers=_layers(config),
        norm_before_residual=bool(config.get("norm_before_residual", speculators)),  # as vLLM has it
        attention_bias=bool(own.get("attention_bias", False)),
        rms_norm_eps=float(own.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=own.get("max_position_embeddings", 2048),
        rope=_rope(own),
    )


def _layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    # vLLM counts layers before the feature; SGLang's `eagle_config` names the layer.
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise ValueError("use_aux_hidden_state: false makes an EAGLE-1 head, which is not supported here")
    if config.get(LAYERS):
        return tuple(config[LAYERS])
    return tuple(layer + 1 for layer in eagle[LAYERS]) if eagle.get(LAYERS) else None


def _rope(own: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(own.get("rope_parameters") or own.get("rope_scaling") or {})
    kind = given.pop("type", None)
    given.setdefault("rope_type", kind or "default")
    given.setdefault("rope_theta", own.get("rope_theta", 10000.0))
    return given


def our_name(name: str) -> str:
    """Returns SpecForge's name of a tensor; others call the layer `layers.0`."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def head_shapes(head: HeadConfig, eagle1: bool = False) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns the shapes of required and of optional tensors, by SpecForge's names."""
    hidden, inner, read = head.hidden_size, head.intermediate_size, (1 if eagle1 else 2) * head.hidden_size
    queries, keys = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
    shapes = {"q": (queries, read), "k": (keys, read), "v": (keys, read), "o": (hidden, queries)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    layer: dict[str, Shape] = {f"{LINEARS[name]}.weight": shape for name, shape in shapes.items()}
    if head.attention_bias:
        layer |= {f"{LINEARS[name]}.bias": shapes[name][:1] for name in "qkvo"}
    norms: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in NORMS}
    embedding: dict[str, Shape] = {EMBEDDING: (head.vocab_size, hidden)}
    output: dict[str, Shape] = {OUTPUT: (head.draft_vocab_size, hidden)}
    if eagle1:
        after, before = (f"midlayer.{name}_layernorm.weight" for name in ("post_attention", "input"))
        own: dict[str, Shape] = {"fc.bias": (hidden,), before: (hidden,)}
        return {FC: (hidden, 2 * hidden), **layer, after: (hidden,)}, {**own, **embedding, **output}
    maps: dict[str, Shape] = {"d2t": (head.draft_vocab_size,), "t2d": (head.vocab_size,)}
    return {FC: (hidden, TAPS * head.target_hidden_size), **layer, **norms, **output}, {**embedding, **maps}


def check_tensors(
    folder: Path,
    required: Mapping[str, Shape],
    optional: Mapping[str, Shape],
    found: Mapping[str, Shape],
    kind: int = 3,
) -> None:
    """Checks names and shapes of an EAGLE-`kind` head's tensors. Raises CheckpointError."""
    known = {**required, **optional}
    if missing := sorted(set(required) - set(found)):
        raise CheckpointError(f"{folder}: the head lacks {', '.join(missing[:3])}")
    if unknown := sorted(set(found) - set(known)):
        raise CheckpointError(f"{folder}: the head has {', '.join(unknown[:3])}, which EAGLE-{kind} heads do not have")
    for name, shape in found.items():
        if shape != known[name]:
            raise CheckpointError(f"{folder}: {name} is {list(shape)}, not {list(known[name])} as config.json has it")


def write_head_config(folder: Path, head: HeadConfig, dtype: str) -> None:
    """Writes config.json. `dtype`: of the weights."""
    (folder / "config.json").write_text(json.dumps(head_fields(head, dtype), indent=2) + "\n", encoding="utf-8")


def head_fields(head: HeadConfig, dtype: str) -> dict[str, Any]:
    scaled = {name: value for name, value in head.rope.items() if name != "rope_theta"}
    layers = {} if head.layers is None else {LAYERS: list(head.layers)}
    eagle = {} if head.layers is None else {LAYERS: [layer - 1 for layer in head.layers]}
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "hidden_act": "silu",
        **{name: getattr(head, name) for name in _WRITTEN},
        "num_hidden_layers": 1,
        "rope_theta": head.rope["rope_theta"],
        "rope_scaling": None if scaled.get("rope_type") == "default" else scaled,
        "tie_word_embeddings": False,
        **layers,
        "torch_dtype": dtype,
        "eagle_config": {"use_aux_hidden_state": True, **eagle},
    }


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """`tensors`: by SpecForge's names, parameters in one dtype, and both token maps."""

    config: HeadConfig
    tensors: Mapping[str, Stored]

    @property
    def token_ids(self) -> NDArray[np.int64]:
        offsets = self.tensors["d2t"].values.astype(np.int64)
        return offsets + np.arange(len(offsets))

    @property
    def parameters(self) -> int:
        return sum(stored.values.size for name, stored in self.tensors.items() if name not in MAPS)

    def shape(self, linear: str) -> tuple[int, int]:
        outputs, inputs = self.tensors[f"{linear}.weight"].shape
        return outputs, inputs

    def bias(self, linear: str, dtype: str) -> Stored | None:
        found = self.tensors.get(f"{linear}.bias")
        return found and found.to(dtype)

    def weight(self, module: str, dtype: str) -> Stored:
        return self.tensors[f"{module}.weight"].to(dtype)


def read_head_weights(folder: Path) -> tuple[HeadWeights, Stored | None]:
    """Returns a head in its `fc`'s dtype and its embedding [vocabulary, hidden], if any. Raises CheckpointError."""
    config = read_head_config(folder)
    tensors = Tensors(folder)
    found = {our_name(name): tensors.stored(name) for name in tensors.files}
    embedding = found.pop(EMBEDDING, None)
    if embedding is not None and embedding.shape != (config.vocab_size, config.hidden_size):
        raise CheckpointError(f"{folder}: {EMBEDDING} is {list(embedding.shape)}, not vocabulary by hidden size")
    if OUTPUT in found:
        _complete_vocabulary(config, found)
    required, optional = head_shapes(config)
    maps = {name: optional[name] for name in MAPS}
    check_tensors(folder, required | maps, {}, {name: stored.shape for name, stored in found.items()})
    dtype = next((name for name, kind in DTYPES.items() if kind == found[FC].dtype), "float32")
    made = HeadWeights(config, {name: each if name in MAPS else each.to(dtype) for name, each in found.items()})
    _check_vocabulary(folder, made)
    return made, embedding


def _complete_vocabulary(config: HeadConfig, found: dict[str, Stored]) -> None:
    # Heads of the whole vocabulary may lack both maps; t2d follows from d2t.
    if "d2t" not in found and config.draft_vocab_size == config.vocab_size:
        found["d2t"] = Stored("I64", np.zeros(config.vocab_size, dtype=np.int64))
    if "t2d" not in found and "d2t" in found:
        ids = found["d2t"].values.astype(np.int64).reshape(-1)
        ids = ids + np.arange(len(ids))
        drafted = np.zeros(config.vocab_size, dtype=np.bool_)
        drafted[ids[(ids >= 0) & (ids < config.vocab_size)]] = True
        found["t2d"] = Stored("BOOL", drafted)


def _check_vocabulary(folder: Path, head: HeadWeights) -> None:
    ids = head.token_ids
    if ids.min() < 0 or ids.max() >= head.config.vocab_size or len(np.unique(ids)) != len(ids):
        raise CheckpointError(f"{folder}: d2t does not name {len(ids)} tokens of {head.config.vocab_size}")
