"""Lists the field names of NxD Inference's configurations; it only warns about unknown ones and ignores them.

Taken from the keywords of `__init__` in NxDI 0.9.0 (4bcdc54, models/config.py). A test compares the lists with the
source if that is available.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEURON = _words(
    """
    activation_quantization_type allow_input_truncation apply_seq_ids_mask async_mode attention_dp_degree
    attention_dtype attn_block_cte_nki_kernel_enabled attn_block_tkg_nki_kernel_cache_update
    attn_block_tkg_nki_kernel_cascaded_attention attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb
    attn_block_tkg_nki_kernel_enabled attn_block_tkg_nki_kernel_use_online_softmax attn_cls attn_kernel_enabled
    attn_tkg_builtin_kernel_enabled attn_tkg_nki_kernel_enabled batch_size bucket_n_active_tokens buckets
    cast_type cc_pipeline_tiling_factor chunked_prefill_config context_encoding_buckets cp_degree ctx_batch_size
    disable_argmax_kernel disable_kv_cache_tiling disable_numeric_cc_token dma_order_config
    draft_model_modules_to_not_convert eagle_rolling_buffer_kernel_enabled enable_bucketing
    enable_cte_modular_flow enable_eagle_draft_input_norm enable_eagle_speculation enable_fused_speculation
    enable_output_completion_notifications enable_spill_reload_dge enable_ve_data_parallel ep_degree
    ep_dispatch_cc_option expert_mlp_nki_kernel_enabled flash_decoding_enabled fused_qkv fused_rmsnorm_skip_gamma
    is_block_kv_layout is_continuous_batching is_eagle3 is_eagle_draft is_full_model_shuffled is_medusa
    is_mxfp4_compute is_prefix_caching k_cache_transposed kv_cache_batch_size kv_cache_padding_size kv_cache_quant
    kv_quant_config layer_boundary_markers lm_head_pad lm_head_pad_alignment_size local_ranks_size
    logical_nc_config logical_neuron_cores lora_config max_batch_size max_context_length max_length max_new_tokens
    medusa_speculation_length medusa_tree mlp_cp_degree mlp_kernel_enabled mlp_kernel_fuse_residual_add
    mlp_tkg_nki_kernel_enabled modules_to_not_convert moe_fused_nki_kernel_enabled n_active_tokens n_positions
    num_medusa_heads on_cpu on_device_sampling_config out_proj_kernel_enabled output_logits overrides_torch_dtype
    pa_block_size pa_num_blocks padded_hidden_size padded_intermediate_size padding_side pp_degree
    pre_rope_rmsnorm prefix_buckets qk_layernorm qkv_cte_nki_kernel_fuse_rope qkv_kernel_enabled
    qkv_kernel_fuse_residual_add qkv_kernel_nbsd_layout qkv_nki_kernel_enabled quantization_block_axis
    quantization_block_size quantization_dtype quantization_scale_dtype quantization_type quantize_clamp_bound
    quantized quantized_checkpoints_path quantized_mlp_kernel_enabled rmsnorm_quantize_kernel_enabled
    router_topk_nki_kernel_enabled rpl_reduce_dtype save_sharded_checkpoint scratchpad_page_size seq_len
    seq_len_threshold_for_cc_tiling sequence_parallel_enabled shared_mlp_nki_kernel_enabled skip_sharding
    skip_warmup spec_batch_size speculation_length start_rank_id strided_context_parallel_kernel_enabled switch_cc
    target tensor_capture_config tensor_replacement_config tkg_batch_size token_generation_batches
    token_generation_buckets token_tree_config torch_dtype tp_degree vocab_parallel
    weight_gather_seq_len_threshold weights_to_skip_layout_optimization windowed_context_encoding_size world_size
    """
)
MIXTURE_OF_EXPERTS = _words(
    """
    blockwise_matmul_config capacity_factor disable_normalize_top_k_affinities early_expert_affinity_modulation
    fused_shared_experts gate_clamp_lower_limit gate_clamp_upper_limit glu_mlp glu_type hidden_act_bias
    hidden_act_scaling_factor hybrid_sharding_config moe_ep_degree moe_mask_padded_tokens moe_tp_degree
    return_expert_index return_router_logits router_config shared_experts_sequence_parallel_enabled
    transpose_shared_experts_weights up_clamp_lower_limit up_clamp_upper_limit use_index_calc_kernel
    """
)
SAMPLING = _words(
    """
    deterministic do_sample dynamic global_topk on_device_sampling_config sampling_dp_degree temperature top_k
    top_k_kernel_enabled top_p
    """
)
KV_QUANTIZATION = frozenset({"k_quant_method", "v_quant_method", "quant_dtype", "direct_cast"})
LORA = _words(
    """
    base_model_quantized batch_size dynamic_multi_lora enable_base_model_only eviction_policy is_context_encoding
    lfu_decay_period lora_bias lora_ckpt_json lora_ckpt_paths lora_ckpt_paths_cpu lora_memory_transpose
    lora_shard_linear_layer max_cpu_loras max_lora_rank max_loras target_modules
    """
)
_NESTED = {"on_device_sampling_config": SAMPLING, "kv_quant_config": KV_QUANTIZATION, "lora_config": LORA}


def check_names(given: Mapping[str, Any], field: str = "neuron_config") -> None:
    """Checks that NxDI knows every name, also in nested configurations. Raises ValueError with the nearest name."""
    _check(given, NEURON | MIXTURE_OF_EXPERTS, field)
    for name, known in _NESTED.items():
        nested = given.get(name)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise ValueError(f"{field}: {name} is {nested!r}, not an object of fields")
        _check(nested, known, f"{field}: {name}")


_ELSEWHERE = {
    "trace_tokengen_model": "since 0.3 it decides by itself which models it traces; leave it out",
    "no_trace_tokengen_model": "since 0.3 it decides by itself which models it traces; leave it out",
    "model": "it is --target_model here",
    "model_path": "it is --target_model here",
    "draft_model": "it is --draft_model here",
    "draft_model_path": "it is --draft_model here",
    "max_model_len": "it is --sequence_length here",
    "max_num_seqs": "it is --batch here",
    "tensor_parallel_size": "it is --tp_degree here",
    "num_speculative_tokens": "it is --speculation_length here, which counts drafts alone",
    "skip_compile": "what is compiled already is found in --compiled_dir; leave it out",
    "compiled_model_path": "it is --compiled_dir here",
    "model_type": "config.json says it; leave it out",
    "task_type": "there is one, generation; leave it out",
    "pad_token_id": "it is of the model's config.json, and Tandem pads rows itself; leave it out",
    "temperature": "requests bring it (--temperature); leave it out",
    "top_k": "requests bring it (--top_k); leave it out",
    "top_p": "requests bring it (--top_p); leave it out",
    "do_sample": "requests bring a temperature; leave it out",
}
"""Names of its demo, of vLLM, of older versions or of a model: where what they mean is said here."""


def _check(given: Iterable[str], known: frozenset[str], field: str) -> None:
    for name in given:
        if name not in known and name in _ELSEWHERE:
            raise ValueError(f"{field}: NxD Inference has no field {name!r}: {_ELSEWHERE[name]}")
        if name not in known:
            cutoff = 0.5 if len(known) < 50 else 0.75  # among many names, one of another thing is always half as alike
            near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{field}: NxD Inference has no field {name!r}{hint}")
