"""The fields of a config.json with a family's defaults; a field that shapes models and that nothing read is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.checkpoints.family import UnsupportedFamily

_GEMMA: Mapping[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "eos_token_id": 1}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "gemma": {**_GEMMA, "max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {
        **_GEMMA,
        **{"max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        **{"query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    },
    "gemma3_text": {
        **_GEMMA,
        **{"max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        **{"query_pre_attn_scalar": 256, "rope_theta": 1e6},
    },
    "phi3": {"max_position_embeddings": 4096, "eos_token_id": 32000, "rms_norm_eps": 1e-5},
    "smollm3": {
        **{"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6, "eos_token_id": 128001},
        **{"tie_word_embeddings": True, "no_rope_layer_interval": 4},
    },
    "olmo2": {"max_position_embeddings": 2048, "eos_token_id": 50279, "rms_norm_eps": 1e-5},
    "olmo3": {
        **{"max_position_embeddings": 2048, "eos_token_id": 50279, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        **{"rope_theta": 500000.0},
    },
    "granite": {"max_position_embeddings": 2048, "eos_token_id": 2, "attention_multiplier": 1.0},
    "stablelm": {
        **{"max_position_embeddings": 4096, "eos_token_id": 0, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        **{"partial_rotary_factor": 0.25},
    },
    "seed_oss": {
        **{"max_position_embeddings": 524288, "eos_token_id": 2, "num_key_value_heads": 8, "head_dim": 128},
        **{"attention_bias": True},
    },
}
FAMILY = tuple(_DEFAULTS)
_SHAPING = frozenset(
    {
        *(
            "attention_bias",
            "attention_chunk_size",
            "attention_multiplier",
            "attention_out_bias",
            "attention_sink_bias",
        ),
        *("attn_logit_softcapping", "attn_temperature_tuning", "alibi", "clip_qkv", "embedding_multiplier"),
        *("final_logit_softcapping", "first_k_dense_replace", "fused_qkv", "interleaved_rope", "kv_lora_rank"),
        *(
            "layer_norm_eps",
            "layer_types",
            "logit_scale",
            "logits_scaling",
            "max_window_layers",
            "mlp_bias",
            "moe_layer_freq",
        ),
        *("moe_intermediate_size", "mscale", "multi_query", "n_routed_experts", "new_decoder_architecture"),
        *("no_rope_layer_interval", "no_rope_layers", "norm_topk_prob", "num_experts", "num_experts_per_tok"),
        *(
            "num_kv_shared_layers",
            "num_local_experts",
            "num_nextn_predict_layers",
            "parallel_attn",
            "partial_rotary_factor",
        ),
        *("position_embedding_type", "q_lora_rank", "qk_layernorm", "qk_nope_head_dim", "qk_norm", "qk_rope_head_dim"),
        *(
            "query_pre_attn_scalar",
            "residual_multiplier",
            "rope_interleaved",
            "rope_local_base_freq",
            "rope_parameters",
        ),
        *("rope_scaling", "rope_theta", "rotary_dim", "rotary_pct", "scale_emb", "scale_depth", "dim_model_base"),
        *("sliding_window", "sliding_window_pattern", "use_bias", "use_bidirectional_attention", "use_mrope"),
        *("use_parallel_residual", "use_qk_norm", "use_qkv_bias", "use_sliding_window", "v_head_dim", "window_size"),
        *(
            "attention_factor",
            "original_max_position_embeddings",
            "hidden_activation",
            "norm_epsilon",
            "rotary_emb_base",
        ),
    }
)
"""Fields of transformers' configurations that change what some family computes."""
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, "", [], {})


class Fields:
    """The fields of a config.json with a family's defaults, which remembers what was read."""

    def __init__(self, kind: str, config: Mapping[str, Any]) -> None:
        self.kind, self._given = kind, config
        self._values = {**_DEFAULTS[kind], **{name: value for name, value in config.items() if value is not None}}
        if "hidden_activation" in config and kind.startswith("gemma"):  # what Gemma's own code reads
            self._values["hidden_act"] = config["hidden_activation"] or self._values["hidden_act"]
        self._nulls = {name for name, value in config.items() if value is None}
        self._read = {"hidden_activation"} if kind.startswith("gemma") else set()

    def get(self, name: str, default: Any = None) -> Any:
        """A field; None where the file says null, which for windows and caps means that there are none."""
        self._read.add(name)
        if name in self._nulls and name in ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping"):
            return None
        return self._values.get(name, default)

    def whole(self, name: str) -> int:
        return count(name, self.get(name))

    def real(self, name: str, default: float) -> float:
        return number(name, self.get(name, default))

    def refuse_unread(self) -> None:
        """Raises UnsupportedFamily for a field that shapes models and that nothing read."""
        for name, value in self._given.items():
            if name in _SHAPING and name not in self._read and not any(value == each for each in _NEUTRAL):
                raise UnsupportedFamily(f"{self.kind} with {name}: {value!s:.60}")


def count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{name}: {value!r:.60} is not a whole number above 0")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: {value!r:.60} is not a number")
    return float(value)
