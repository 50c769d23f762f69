"""Reads the configuration of a model of the Llama family from a GGUF's metadata."""

from __future__ import annotations

from typing import Any

from tandem.checkpoints.family import FamilyConfig
from tandem.checkpoints.family_configs import family_of
from tandem.checkpoints.gguf_header import Header

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
