"""Refuses fields that NxD Inference 0.9 breaks or ignores, before compiling; each reason names the source file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]
Rule = tuple[str, Callable[[Fields], Any], str]


def _fused(c: Fields) -> bool:
    return bool(c.get("enable_fused_speculation"))


def _sampling(c: Fields) -> Mapping[str, Any]:
    return c.get("on_device_sampling_config") or {}


def _any(c: Fields, *names: str) -> bool:
    return any(c.get(name) is not None for name in names)


def _adapters(lora: Mapping[str, Any]) -> bool:
    several = max(len(lora.get("lora_ckpt_paths") or ()), int(lora.get("max_loras", 1))) > 1
    return bool(several or lora.get("dynamic_multi_lora") or lora.get("enable_base_model_only"))


def _context_buckets(c: Fields) -> list[int]:
    return [*(c.get("context_encoding_buckets") or ()), int(c["max_context_length"])]


# An argmax's values of sampler fields.
ARGMAX = dict(
    top_k=1, top_p=1.0, temperature=1.0, dynamic=False, deterministic=False, global_topk=256, sampling_dp_degree=1
)
EAGLE3_NEEDS = ("sequence_parallel_enabled", "enable_eagle_draft_input_norm")
DTYPES = ("int8", "f8e4m3", "f8e4m3fn", "f8e5m2")
TYPES = ("per_tensor_symmetric", "per_channel_symmetric")


RULES: tuple[Rule, ...] = (
    (
        "async_mode",
        lambda c: c.get("async_mode") and _fused(c) and c["batch_size"] > 1,
        "an asynchronous step ignores its inputs (async_execution.py), so a row that was prefilled anew or rolled back "
        "would be lost. With --batch 1 it can be used",
    ),
    (
        "output_logits",
        lambda c: c.get("output_logits") and c.get("on_device_sampling_config") is None,
        "logits are on the host already, and would come twice, as a list of two (model_base.py)",
    ),
    (
        "on_device_sampling_config",
        lambda c: _sampling(c).get("do_sample"),
        "do_sample draws on the device: fused speculation fails (model_base.py), and no draw could be repeated. With "
        "top_k 1 it is an argmax, and accepted",
    ),
    (
        "on_device_sampling_config",
        lambda c: any(_sampling(c).get(name, value) != value for name, value in ARGMAX.items()),
        f"the device is asked for its argmax alone, and would read none of {', '.join(ARGMAX)}",
    ),
    (
        "lora_config",
        lambda c: c.get("lora_config") and _fused(c),
        "adapters are not passed to fused models: they get empty tensors (model_base.py)",
    ),
    (
        "lora_config",
        lambda c: _adapters(c.get("lora_config") or {}),
        "with more than one adapter, dynamic_multi_lora or enable_base_model_only a request has to name one, and "
        "requests name those of --adapters",
    ),
    (
        "context_encoding_buckets",
        lambda c: c.get("speculation_length") and c["speculation_length"] in _context_buckets(c),
        "a bucket of exactly speculation_length tokens is traced as a verification, with wrong logits (model_base.py)",
    ),
    (
        "prefix_buckets, pa_num_blocks, pa_block_size",
        lambda c: _any(c, "prefix_buckets", "pa_num_blocks", "pa_block_size"),
        "they are of a paged KV cache, and this backend sends no block tables",
    ),
    (
        "n_active_tokens, bucket_n_active_tokens, buckets, max_new_tokens",
        lambda c: _any(c, "n_active_tokens", "bucket_n_active_tokens", "buckets", "max_new_tokens"),
        "NxDI sets them anew for every sub-model (model_base.py); use --sequence_length, context_encoding_buckets and "
        "token_generation_buckets",
    ),
    (
        "draft_model_modules_to_not_convert",
        lambda c: c.get("draft_model_modules_to_not_convert") is not None and not _fused(c),
        "it is for the draft of --role fused_target; this role loads one model",
    ),
    (
        "sequence_parallel_enabled, enable_eagle_draft_input_norm",
        lambda c: c.get("is_eagle3") and not all(c.get(name) for name in EAGLE3_NEEDS),
        "an EAGLE-3 head needs both: else context encoding drops the state that its logits are of (model_base.py), or "
        "its inputs are not normed (modeling_llama.py)",
    ),
    (
        "context_encoding_buckets",
        lambda c: c.get("sequence_parallel_enabled") and any(n % c["tp_degree"] for n in _context_buckets(c)),
        "sequence_parallel_enabled divides prompts among tp_degree cores, and a bucket is no multiple (mappings.py)",
    ),
    (
        "padding_side",
        lambda c: c.get("padding_side", "right") != "right",
        "left padding shifts the KV cache at every token (kv_cache_manager): nothing can be rolled back",
    ),
    (
        "windowed_context_encoding_size",
        lambda c: c.get("windowed_context_encoding_size") and c["batch_size"] > 1,
        "its windows are written without regard to the sequence's line (kv_cache_manager)",
    ),
    (
        "quantization_dtype",
        lambda c: c.get("quantization_dtype", DTYPES[0]) not in DTYPES,
        f"it is not one of {', '.join(DTYPES)}",
    ),
    (
        "quantization_type",
        lambda c: c.get("quantization_type", TYPES[0]) not in TYPES,
        f"it is not one of {', '.join(TYPES)}",
    ),
    (
        "quantization_dtype, quantization_type, modules_to_not_convert",
        lambda c: (
            not any(c.get(n) for n in ("quantized", "quantized_mlp_kernel_enabled", "activation_quantization_type"))
            and _any(c, "quantization_dtype", "quantization_type", "modules_to_not_convert")
        ),
        "they are read with quantized: true, or with a quantized MLP kernel or activations",
    ),
    (
        "attention_dp_degree",
        lambda c: int(c.get("attention_dp_degree", 1)) > 1,
        "its KV lines are split among ranks, and idle lines would be written where they are not",
    ),
    ("pp_degree", lambda c: int(c.get("pp_degree", 1)) > 1, "pipeline parallel models were never run from here"),
)


def _breaks(c: Fields, row: Mapping[str, Any]) -> bool:
    """A row of refusals.json: all of `if` are set, none of `unless`, one of `any`."""
    needed, one = all(map(c.get, row.get("if", ()))), any(map(c.get, row.get("any", ())))
    return needed and not any(map(c.get, row.get("unless", ()))) and (one or "any" not in row)


def refuse_broken(fields: Fields) -> None:
    """Raises ValueError for the first broken combination in the whole build's `fields`."""
    found = [(names, reason) for names, broken, reason in RULES if broken(fields)]
    table = json.loads(Path(__file__).with_name("refusals.json").read_text(encoding="utf-8"))
    for names, reason in [*found, *((row["fields"], row["why"]) for row in table if _breaks(fields, row))]:
        raise ValueError(f"neuron_config: {names} cannot be used here: {reason}")
