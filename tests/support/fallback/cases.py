"""Settings of tiny models, one or more for each architecture that runs on mlx-lm's graphs and that transformers has as well."""

from __future__ import annotations

from typing import Any

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1}
_ONE_GROUP = {**_GROUPED, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
_WINDOW = {"sliding_window": 24, "num_hidden_layers": 4}
_OLMOE = {"num_experts": 4, "num_experts_per_tok": 2}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_VISION = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}

CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "afmoe": (
        {**_EXPERTS, **_HEAD, **_WINDOW, "num_dense_layers": 1, "mup_enabled": True, "route_scale": 1.5, "global_attn_every_n_layers": 2},
    ),
    "apertus": ({},),
    "bailing_hybrid": (
        {
            **_ONE_GROUP,
            **_HEAD,
            **_LATENT,
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "layer_group_size": 2,
        },
    ),
    "bitnet": ({},),
    "cohere": ({"logit_scale": 0.3}, {"use_qk_norm": True}),
    "dbrx": (
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek_v32": (
        {**_ONE_GROUP, **_LATENT, "index_topk": 256, "index_head_dim": 16, "index_n_heads": 2},
        {**_ONE_GROUP, **_LATENT, "index_topk": 24, "index_head_dim": 16, "index_n_heads": 16},
    ),
    "deepseek_v3": ({**_GROUPED, **_LATENT, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "rope_parameters": _YARN},),
    "dots1": ({**_ONE_GROUP, **_HEAD}, {**_GROUPED, **_HEAD, "n_routed_experts": 6, "n_group": 3, "topk_group": 2}),
    "exaone_moe": ({**_EXPERTS, **_HEAD, **_WINDOW, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},),
    "falcon_mamba": ({"state_size": 8, "num_hidden_layers": 2},),
    "gemma": (_HEAD,),
    "gemma3n_text": (
        {
            **_HEAD,
            **_WINDOW,
            "num_kv_shared_layers": 2,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "laurel_rank": 8,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
        },
    ),
    "glm": ({**_HEAD, "partial_rotary_factor": 0.5, "attention_bias": True},),
    "glm_moe_dsa": (
        {**_ONE_GROUP, **_LATENT, "index_topk": 256, "index_head_dim": 16, "index_n_heads": 2},
        {**_ONE_GROUP, **_LATENT, "index_topk": 24, "index_head_dim": 16, "index_n_heads": 16},
    ),
    "gpt2": (_GPT2, {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": (_GPT2, {**_GPT2, "multi_query": False}),
    "gpt_neox": ({"intermediate_size": 256}, {"intermediate_size": 256, "use_parallel_residual": False, "rotary_pct": 0.5}),
    "gptj": ({**_GPT2, "rotary_dim": 8},),
    "granitemoe": (
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "helium": (_HEAD,),
    "internlm3": ({**_HEAD, "attention_bias": True, "mlp_bias": True}, _HEAD),
    "iquestcoder": (_HEAD,),
    "jamba": (
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "laguna": ({**_EXPERTS, **_HEAD, **_WINDOW, "shared_expert_intermediate_size": 32, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]},),
    "llama4_text": (
        {
            **_HEAD,
            "num_local_experts": 0,
            "moe_layers": [],
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 256,
            "tie_word_embeddings": True,
        },
        {
            **_HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "floor_scale": 16,
        },
    ),
    "longcat_flash": (
        {
            "num_layers": 2,
            **_LATENT,
            "head_dim": 8,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "mamba": ({"state_size": 8, "num_hidden_layers": 2},),
    "mamba2": tuple(
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2, "n_groups": groups, "num_hidden_layers": 2} for groups in (1, 2)
    ),
    "mellum": ({**_EXPERTS, **_HEAD, **_WINDOW, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},),
    "mimo_v2_flash": ({**_ONE_GROUP, **_HEAD, **_WINDOW, "v_head_dim": 8, "layer_types": [FULL, SLIDING, SLIDING, FULL]},),
    "minimax": (
        {**_HEAD, "num_local_experts": 4, "block_size": 32, "layer_types": [LINEAR, FULL, LINEAR]},
        {**_HEAD, "num_local_experts": 4, "block_size": 32, "layer_types": [LINEAR, FULL, LINEAR], "linear_attn_alpha_factor": 1.7},
    ),
    "nanochat": ({}, {"final_logit_softcapping": 4.0}),
    "nemotron": ({}, {"partial_rotary_factor": 0.25}),
    "olmo_hybrid": ({**_DELTA, "num_hidden_layers": 4},),
    "olmoe": (_OLMOE, {**_OLMOE, "norm_topk_prob": True}, {**_OLMOE, "clip_qkv": 0.5}),
    "phi": ({}, {"partial_rotary_factor": 0.25}),
    "phimoe": ({"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},),
    "qwen2_moe": tuple(
        {**_EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "norm_topk_prob": norm} for norm in (False, True)
    ),
    "recurrent_gemma": ({"attention_window_size": 24, "lru_width": 64, "num_key_value_heads": 1},),
    "solar_open": tuple({**_ONE_GROUP, **_HEAD, "first_k_dense_replace": 0, **rope} for rope in ({}, {"rope_parameters": _YARN})),
    "stablelm": ({}, {"use_qkv_bias": True}, {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ({}, {"sliding_window": 24}),
}
"""By `model_type`: what differs from `BASE`, in one or more models."""

WRAPPED = {"gemma3n": "gemma3n_text"}
"""Models that also see images, and that of the cases above which is their text model: the whole needs packages that are not installed."""

RENAMED = {"joyai_llm_flash": "deepseek_v3", "kimi_k2": "deepseek_v3"}
"""`model_type` of checkpoints that transformers does not have, with the case above whose checkpoint they share."""

_TEXT = {**BASE, **_HEAD}
_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_PROJECTOR = {"out_hidden_size": 32, "projector_hidden_size": 32}
_FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
_M3 = {
    **_TEXT,
    **_FEW,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 32,
    "rotary_dim": 8,
    "rope_parameters": _HALF,
}
_M3_SPARSE = {
    "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 8,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
}
WHOLE: dict[str, tuple[dict[str, Any], ...]] = {
    "llama4": ({"text_config": {**BASE, **CASES["llama4_text"][1]}, "vision_config": _SMALL},),
    "minimax_m3_vl": tuple(
        {"text_config": {**_M3, **layers}, "vision_config": {**_SMALL, "image_size": 28}, "projector_hidden_size": 32}
        for layers in ({}, _M3_SPARSE)
    ),
    "muse_glimmer": ({"text_config": {**_TEXT, **_WINDOW}, "vision_config": _SMALL, **_PROJECTOR},),
    "muse_spark": (
        {
            "text_config": {**_TEXT, **_WINDOW, **_FEW, "moe_hidden_size": 32, "moe_intermediate_size": 32},
            "vision_config": _SMALL,
            "audio_config": {"hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1], "out_hidden_size": 64},
            **_PROJECTOR,
        },
    ),
}
"""The same for models that also see images, whose text model alone runs here."""
