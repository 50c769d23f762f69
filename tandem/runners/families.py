"""The tested families of models, by model_type of config.json, and what fits a slot cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.checkpoints.family_configs import FAMILY as NATIVE
from tandem.checkpoints.locate import CheckpointError


class UnsupportedModel(ValueError):
    """The slot cache cannot serve this model."""


@dataclass(frozen=True, slots=True)
class Family:
    """`native`: native steps run it, besides module code. `refused`: why no backend serves it; "": served."""

    native: bool = False
    refused: str = ""


_NATIVE, _MODULE = Family(native=True), Family()
_LATENT = Family(refused="keys and values have sizes of their own (latent attention)")
_STATE = Family(refused="its layers keep a state that cannot be rolled back")
_IMAGES = Family(refused="a model of images and text, whose text part is not loaded alone")
_OWN = Family(refused="its attention is not transformers' attention interface")

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(NATIVE, _NATIVE),
    **dict.fromkeys(("apertus", "arcee", "biogpt", "bitnet", "cohere", "cohere2", "cwm", "diffllama"), _MODULE),
    **dict.fromkeys(("ernie4_5", "glm", "glm4", "gpt2"), _MODULE),
    **dict.fromkeys(("gpt_bigcode", "gpt_neox", "helium", "hunyuan_v1_dense", "jais2"), _MODULE),
    **dict.fromkeys(("ministral3", "nanochat", "nemotron", "olmo", "opt"), _MODULE),
    **dict.fromkeys(("persimmon", "phi", "starcoder2", "vaultgemma"), _MODULE),
    **dict.fromkeys(("afmoe", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss"), _MODULE),
    **dict.fromkeys(("granitemoe", "jetmoe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe"), _MODULE),
    **dict.fromkeys(("qwen3_moe", "solar_open"), _MODULE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "mamba", "mamba2", "minimax", "olmo_hybrid"), _STATE),
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "zamba2"), _STATE),
    **dict.fromkeys(("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt"), _OWN),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "llama4", "mistral3", "qwen2_vl", "qwen3_vl"), _IMAGES),
    "gemma4_text": Family(refused="its layers differ in the sizes of their keys"),
    "llama4_text": Family(refused="its attention is cut into chunks"),
}


def check_family(folder: str, config: Mapping[str, Any], untested: bool = False) -> None:
    """Raises CheckpointError for a family that is refused, or untested unless `untested` allows it."""
    kind = str(config.get("model_type"))[:60]
    family = FAMILIES.get(kind)
    if family and family.refused:
        raise CheckpointError(f"{folder}: model_type: nothing here serves {kind}: {family.refused}")
    if family is None and not untested:
        raise CheckpointError(
            f"{folder}: model_type: {kind} is not among the families that were tested (docs/models.md); "
            "--untested_model tries it in module code"
        )


def context_length(positions: int, ropes: Sequence[Mapping[str, Any]]) -> int:
    """A model's positions, as extended by its rotary embeddings."""
    seen = {"yarn": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
    factors = [
        float(rope.get("factor") or 1) * (rope.get(seen[kind]) or positions)
        for rope in ropes
        if (kind := str(rope.get("rope_type"))) in seen
    ]
    return max([positions, *map(int, factors)])


def check_fits(config: Any, max_length: int, ranks: int = 1) -> None:
    """Raises UnsupportedModel unless each layer attends to `max_length` positions or a window; `ranks` divide heads."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if heads % ranks:
        raise UnsupportedModel(f"tp_degree: {ranks} does not divide the model's {heads} key-value heads")
    positions = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "ropes", None) or [getattr(config, "rope_parameters", None) or {}]
    positions = positions and context_length(positions, ropes)
    if positions and max_length > positions:
        raise UnsupportedModel(f"sequence_length: {max_length} is above the model's {positions} positions")
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"attention of kind {', '.join(sorted(others))} does not fit a slot cache")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("models with attention_chunk_size are not supported")
