"""Decoder weights by transformers' names, from a folder or GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tandem.checkpoints.family_configs import MATRICES, FamilyConfig, matrix_name, read_family
from tandem.checkpoints.gguf_blocks import MATRIX_NAMES, Blocks, StoredWeights
from tandem.checkpoints.gguf_family import FREQUENCIES, LONG, SHORT, family_of_gguf
from tandem.checkpoints.locate import CheckpointError
from tandem.checkpoints.numbers import Stored
from tandem.checkpoints.scaled_weights import ScaledWeights

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
NORM_BIAS = "model.norm.bias"
_BESIDE = {"q": "k", "k": "q", "v": "q", "gate": "up", "up": "gate"}
_TOGETHER = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_MATRIX = re.compile(r"(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj")
_BUFFER = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|attn\.bias|attn\.masked_bias)")
"""Buffers that old transformers saved, derived from the configuration."""


def rows_together(config: FamilyConfig, name: str) -> slice:
    """Returns the rows of q, k or v (or gate or up) in their merged tensor."""
    before: dict[str, tuple[str, ...]] = {"k": ("q",), "v": ("q", "k"), "up": ("gate",)}
    first = sum(config.shape(each)[0] for each in before.get(name, ()))
    return slice(first, first + config.shape(name)[0])


class FamilyWeights:
    """Weights by transformers' names, each in a tensor or in rows of one."""

    def __init__(self, config: FamilyConfig, source: ScaledWeights | StoredWeights) -> None:
        self.config, self._source = config, source

    def _tensor(self, name: str) -> str:
        """Returns the source's tensor, which may hold further matrices."""
        raise NotImplementedError

    def _rows(self, name: str) -> slice:
        """Returns the matrix's rows, those of a tensor that several share."""
        found = _LAYER.fullmatch(name)
        matrix = found and _MATRIX.fullmatch(found[2])
        if not matrix or not (other := _BESIDE.get(matrix[1])):
            return slice(None)
        shared = self._tensor(name) == self._tensor(name.replace(f"{matrix[1]}_proj", f"{other}_proj"))
        return rows_together(self.config, matrix[1]) if shared else slice(None)

    def unused(self, wanted: Iterable[str]) -> list[str]:
        """Returns tensors that none of `wanted` uses."""
        raise NotImplementedError

    def __contains__(self, name: object) -> bool:
        return self._tensor(str(name)) in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        outputs, *inputs = self._source.shape(self._tensor(name))
        return len(range(*self._rows(name).indices(outputs))), *inputs

    def stored(self, name: str) -> Stored:
        """Returns dequantised numbers."""
        whole = self._source.stored(self._tensor(name))
        return Stored(whole.dtype, whole.values[self._rows(name)])

    def _unused(self, wanted: Iterable[str], *known: str) -> list[str]:
        taken = {*map(self._tensor, wanted), *known}
        return [name for name in self._source.names() if name not in taken]


class FolderWeights(FamilyWeights):
    """Models saved without their head lack `model.` in names."""

    def __init__(self, folder: Path) -> None:
        self.scaled = ScaledWeights(folder)
        super().__init__(read_family(folder), self.scaled)

    def unused(self, wanted: Iterable[str]) -> list[str]:
        tied = HEAD if self.config.tie_word_embeddings else ""
        return [name for name in self._unused(wanted, tied) if not _BUFFER.fullmatch(name)]

    def _tensor(self, name: str) -> str:
        own = self._own(name)
        if own in self.scaled or not (found := _LAYER.fullmatch(name)) or not (matrix := _MATRIX.fullmatch(found[2])):
            return own
        if matrix[1] not in _TOGETHER:
            return own
        together = self._own(name.replace(f"{matrix[1]}_proj", f"{_TOGETHER[matrix[1]]}_proj"))
        return together if together in self.scaled else own

    def _own(self, name: str) -> str:
        return name if name in self.scaled else name.removeprefix("model.")


class GgufWeights(FamilyWeights):
    """Also a BlockSource of packing."""

    def __init__(self, file: Path) -> None:
        self.blocks = StoredWeights(file)
        super().__init__(family_of_gguf(self.blocks), self.blocks)
        self.formats, self.head = self.blocks.formats, self.blocks.head

    def unused(self, wanted: Iterable[str]) -> list[str]:
        return self._unused(wanted, LONG, SHORT, FREQUENCIES)

    def matrix(self, layer: int, name: str) -> Blocks | None:
        place = matrix_name(layer, name)
        found = self.blocks.block(self._tensor(place))
        return found and Blocks(found.format, found.rows[self._rows(place)])

    def _tensor(self, name: str) -> str:
        found = _LAYER.fullmatch(name)
        if not found:
            return _GGUF.get(name, name)
        layer, part, kind = found.groups()
        if (matrix := _MATRIX.fullmatch(part)) is None:
            own = f"blk.{layer}.{self._norm(part)}.{kind}"
            other = own.replace(".ffn_norm.", ".post_attention_norm.")  # what Seed-OSS has in its place
            return own if own in self.blocks else other
        own = f"blk.{layer}.{MATRIX_NAMES[matrix[1]]}.{kind}"
        together = f"blk.{layer}.{'attn_qkv' if matrix[1] in 'qkv' else 'ffn_up'}.{kind}"
        alone = own if matrix[1] in "qkv" else f"blk.{layer}.ffn_gate.{kind}"
        merged = matrix[1] in _TOGETHER and alone not in self.blocks and together in self.blocks
        return together if merged else own

    def _norm(self, part: str) -> str:
        places = {name: place for place, name in self.config.norm_names.items()}
        return _NORMS.get(places.get(part, part), part)


_GGUF = {EMBEDDING: "token_embd.weight", NORM: "output_norm.weight", NORM_BIAS: "output_norm.bias"}
_GGUF |= {HEAD: "output.weight"}
_NORMS = {
    "before_attention": "attn_norm",
    "after_attention": "post_attention_norm",
    "before_mlp": "ffn_norm",
    "after_mlp": "post_ffw_norm",
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
}


def check_complete(weights: FamilyWeights) -> None:
    """Raises CheckpointError unless all weights exist, fit the configuration and are used."""
    wanted = shapes(weights.config)
    missing = sorted(name for name in wanted if name not in weights)
    if missing:
        raise CheckpointError(f"weights lack {', '.join(missing[:3])}")
    for name, shape in wanted.items():
        found = weights.shape(name)
        if found != shape:
            raise CheckpointError(f"{name} is {list(found)}, not {list(shape)} as the configuration has it")
    if unused := sorted(weights.unused(wanted)):
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        kind = weights.config.model_type
        raise CheckpointError(f"weights have {', '.join(unused[:3])}{more}, which a model of type {kind} does not use")


def shapes(config: FamilyConfig) -> dict[str, tuple[int, ...]]:
    hidden, kinds = config.hidden_size, ("weight", "bias") if config.family.norm == "layer" else ("weight",)
    wanted: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
    if config.family.norm == "layer":
        wanted[NORM_BIAS] = (hidden,)
    if not config.tie_word_embeddings:
        wanted[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        of = f"model.layers.{layer}."
        for name in config.norm_names.values():
            wanted |= {f"{of}{name}.{kind}": (hidden,) for kind in kinds}
        for name in "qk" if config.family.head_norms else "":
            width = config.head_dim if config.family.head_norms == "head" else config.shape(name)[0]
            wanted[f"{of}self_attn.{name}_norm.weight"] = (width,)
        for name in MATRICES:
            matrix = matrix_name(layer, name)
            wanted[matrix] = config.shape(name)
            if name in config.biases:
                wanted[matrix.removesuffix("weight") + "bias"] = config.shape(name)[:1]
    return wanted
