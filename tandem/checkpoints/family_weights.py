"""Weights of a model of the Llama family by the names of transformers: those of a folder, or those of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tandem.checkpoints.family import FamilyConfig, Norms
from tandem.checkpoints.family_configs import read_family
from tandem.checkpoints.gguf_blocks import MATRIX_NAMES, StoredWeights
from tandem.checkpoints.gguf_family import family_of_gguf
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.numbers import Stored
from tandem.checkpoints.scaled_weights import SCALES, ScaledWeights

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_GGUF = {EMBEDDING: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}
_PARTS = {
    **{f"{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj": own for name, own in MATRIX_NAMES.items()},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_PART = re.compile(r"(model\.layers\.\d+\.(self_attn|mlp)\.)(q|k|v|gate|up)_proj\.(weight|bias)")
_BUFFERS = ("rotary_emb.inv_freq", "self_attn.masked_bias")  # which old files keep, and transformers computes
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def matrix_name(layer: int, name: str) -> str:
    """The name of the matrix q, k, v, o, gate, up or down of a layer."""
    return f"model.layers.{layer}.{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj.weight"


def norm_names(norms: Norms) -> dict[str, str]:
    """Names of a layer's norms, without ".weight", by their places in LayerWeights of transformer.h."""
    names: dict[str, str] = {}
    if norms.before:
        mlp = "pre_feedforward_layernorm" if norms.after else "post_attention_layernorm"
        names |= {"attention_norm": "input_layernorm", "mlp_norm": mlp}
    if norms.after:
        names |= {"attention_after": "post_attention_layernorm", "mlp_after": "post_feedforward_layernorm"}
    if norms.heads:
        names |= {f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
    return names


def fused_rows(config: FamilyConfig, name: str) -> tuple[str, slice] | None:
    """The matrix that has a layer's matrix among its rows where such are fused (Phi-3), and these rows."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    whole, parts = ("qkv", "qkv") if match[3] in "qkv" else ("gate_up", ("gate", "up"))
    rows = [config.shape(part)[0] for part in parts]
    at = list(parts).index(match[3])
    return f"{match[1]}{whole}_proj.{match[4]}", slice(sum(rows[:at]), sum(rows[: at + 1]))


class FamilyWeights(Protocol):
    """A model's configuration and its weights. Methods raise CheckpointError."""

    @property
    def config(self) -> FamilyConfig: ...

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored(self, name: str) -> Stored:
        """A weight as numbers: quantised ones multiplied by their scales, or dequantised."""


class FolderWeights:
    """The weights of a folder. Those of a model that was saved without its head lack `model.` in their names."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError, UnsupportedFamily, or ValueError naming a field; OSError for config.json."""
        self.config, self.scaled = read_family(folder), ScaledWeights(folder)

    def __contains__(self, name: object) -> bool:
        return self._place(str(name))[0] in self.scaled

    def shape(self, name: str) -> tuple[int, ...]:
        own, rows = self._place(name)
        outputs, *rest = self.scaled.shape(own)
        return (outputs if rows is None else len(range(outputs)[rows]), *rest)

    def stored(self, name: str) -> Stored:
        own, rows = self._place(name)
        whole = self.scaled.stored(own)
        return whole if rows is None else Stored(whole.dtype, whole.values[rows])

    def check_used(self, wanted: Iterable[str]) -> None:
        """Raises CheckpointError for a tensor that belongs to none of the weights `wanted`."""
        used = {self._place(name)[0] for name in wanted}
        used |= {name + end for name in used for end in SCALES}
        used |= {HEAD} if self.config.tie_word_embeddings else set()
        for name in sorted(set(self.scaled.names()) - used):
            if not name.endswith(_BUFFERS):
                raise CheckpointError(f"{self.scaled.folder}: no layer of a {self.config.model_type} model uses {name}")

    def _place(self, name: str) -> tuple[str, slice | None]:
        """The tensor where a weight lies, and which rows of it the weight is, None for all."""
        fused = None if name in self.scaled else fused_rows(self.config, name)
        own, rows = fused or (name, None)
        return own if own in self.scaled else own.removeprefix("model."), rows


class GgufWeights:
    """The weights of a GGUF file."""

    def __init__(self, file: Path) -> None:
        """Raises CheckpointError, UnsupportedFamily, or ValueError naming a field."""
        self.blocks = StoredWeights(file)
        self.config = family_of_gguf(self.blocks.header)

    def __contains__(self, name: object) -> bool:
        return _gguf_name(str(name)) in self.blocks

    def shape(self, name: str) -> tuple[int, ...]:
        return self.blocks.shape(_gguf_name(name))

    def stored(self, name: str) -> Stored:
        return self.blocks.dense(_gguf_name(name))


def _gguf_name(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        return f"blk.{match[1]}.{_PARTS.get(match[2], match[2])}.{match[3]}"
    return _GGUF.get(name, name)


def check_complete(weights: FamilyWeights) -> None:
    """Raises CheckpointError unless a model's weights are all there, fit its configuration, and are all used."""
    wanted = _shapes(weights.config)
    missing = sorted(name for name in wanted if name not in weights)
    if missing:
        raise CheckpointError(f"weights lack {', '.join(missing[:3])}")
    for name, shape in wanted.items():
        found = weights.shape(name)
        if found != shape:
            raise CheckpointError(f"{name} is {list(found)}, not {list(shape)} as the configuration has it")
    if isinstance(weights, FolderWeights):
        weights.check_used(wanted)


def _shapes(config: FamilyConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    wanted: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)} | _norm(config, NORM, hidden)
    if not config.tie_word_embeddings:
        wanted[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        of = f"model.layers.{layer}."
        for place, name in norm_names(config.norms).items():
            of_heads = config.shape(place[0])[0] if config.norms.heads == "row" else config.head_dim
            wanted |= _norm(config, f"{of}{name}.weight", of_heads if place in ("q_norm", "k_norm") else hidden)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            matrix = matrix_name(layer, name)
            wanted[matrix] = config.shape(name)
            if name in config.biases:
                wanted[matrix.removesuffix("weight") + "bias"] = config.shape(name)[:1]
    return wanted


def _norm(config: FamilyConfig, name: str, width: int) -> dict[str, tuple[int, ...]]:
    names = [name, name.removesuffix("weight") + "bias"] if config.norms.kind == "layer" else [name]
    return {each: (width,) for each in names}
