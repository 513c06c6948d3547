"""The settings of the models that `make_gguf.py` writes, by the names of their files. What llama.cpp has in code rather than in the file
(which layers have a window, which have no rope, constant factors) is as it assumes."""

from __future__ import annotations

from typing import Any

VOCAB = 96
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DELTA = {"linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "deepseek_v2": {"scoring_func": "softmax"},
    "deepseek_v3": {"scoring_func": "sigmoid"},
    "glm4_moe_lite": {"scoring_func": "sigmoid"},
    "kimi_linear": {"moe_router_activation_func": "sigmoid", "first_k_dense_replace": 1},
    "minimax_m2": {"scoring_func": "sigmoid"},
}
"""By `model_type`: keys of published configs."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LETTERS = {"mamba": "M", LINEAR: "M", "attention": "*", FULL: "*", "mlp": "-", "moe": "E"}
"""Kinds of layers in Nemotron-H's published patterns."""
GROWING = YARN | {"rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
STRETCHED = YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.7}
CHOSEN = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
NEMOTRON = {"head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "num_hidden_layers": 3}
GRANITE_H = {**MAMBA, "mamba_expand": 2, "shared_intermediate_size": 48, "layer_types": [LINEAR, FULL], "attention_multiplier": 0.2}
FALCON = {
    **MAMBA,
    "head_dim": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 2,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "ssm_multipliers": [0.5, 0.7, 2.0, 3.0, 6.0],
    "mlp_multipliers": [0.6, 0.8],
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.4,
    "key_multiplier": 0.3,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 24,
    "layer_types": [SLIDING, FULL],
    "hidden_size_per_layer_input": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 100000.0, "head_dim": 16, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama_linear": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_scaling": YARN},
    "qwen3moe": dict(model_type="qwen3_moe", head_dim=16, mlp_only_layers=[], **EXPERTS),
    "qwen3next": dict(
        model_type="qwen3_next",
        shared_expert_intermediate_size=16,
        mlp_only_layers=[],
        layer_types=["linear_attention", "full_attention"],
        **DELTA,
        **EXPERTS,
    ),
    "qwen35": dict(model_type="qwen3_5_text", num_hidden_layers=4, **DELTA),
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
    },
    "gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
    "phi3": {"model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
    },
    "qwen35moe": dict(
        model_type="qwen3_5_moe_text",
        num_hidden_layers=2,
        layer_types=[LINEAR, FULL],
        full_attention_interval=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        shared_expert_intermediate_size=16,
        **DELTA,
        **EXPERTS,
    ),
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "mistral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": GROWING},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "rope_parameters": {
            FULL: YARN | {"rope_theta": 5e5, "factor": 8.0, "attention_factor": 1.2079441541679836},
            SLIDING: {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "glm4": {"model_type": "glm4", "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4moe": dict(model_type="glm4_moe", head_dim=16, **CHOSEN, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5),
    "cohere2": {
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "logit_scale": 0.3,
    },
    "exaone4": {
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "sliding_window_pattern": "LLLG",
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "rope_scaling": LLAMA3,
    },
    "exaone4_full": {"model_type": "exaone4", "sliding_window": None, "layer_types": [FULL, FULL], "tie_word_embeddings": True},
    "hunyuan-dense": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "rope_scaling": {"rope_type": "dynamic", "type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16, "attention_bias": True},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16},
    "ernie4_5-moe": {
        "model_type": "ernie4_5_moe",
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_intermediate_size": 12,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "intermediate_size": 16,
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {"model_type": "lfm2", "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", FULL, "conv"]},
    "lfm2moe": {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
        "layer_types": ["conv", FULL, "conv"],
    },
    "gemma4": {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "global_head_dim": 32, "final_logit_softcapping": 3.0},
    "gemma4_experts": {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gemma4_shared": {
        **GEMMA4,
        "num_hidden_layers": 5,
        "intermediate_size": 32,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "nemotron_h": {"model_type": "nemotron_h", **NEMOTRON, "hybrid_override_pattern": "M*-", "n_groups": 2, "use_conv_bias": True},
    "nemotron_h_moe": {
        "model_type": "nemotron_h",
        **NEMOTRON,
        "hybrid_override_pattern": "*EM",
        "n_groups": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
    },
    "granitehybrid": {
        "model_type": "granitemoehybrid",
        **GRANITE_H,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "granitehybrid_dense": {
        "model_type": "granitemoehybrid",
        **GRANITE_H,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_groups": 2,
    },
    "falcon-h1": {"model_type": "falcon_h1", **FALCON},
    "falcon-h1_norms": {"model_type": "falcon_h1", **FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "deepseek2": dict(model_type="deepseek_v2", q_lora_rank=16, **LATENT, **CHOSEN),
    "deepseek2_lite": dict(model_type="deepseek_v2", q_lora_rank=None, **LATENT, **CHOSEN),
    "deepseek3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 16,
        "rope_parameters": STRETCHED,
        **LATENT,
        **CHOSEN,
        "n_group": 2,
    },
    "glm4_moe_lite": dict(model_type="glm4_moe_lite", q_lora_rank=16, mlp_layer_types=["dense", "sparse"], **LATENT, **CHOSEN),
    "mistral4": dict(model_type="mistral4", q_lora_rank=16, rope_parameters=GROWING | {"llama_4_scaling_beta": 0.0}, **LATENT, **CHOSEN),
    "minicpm3": {"model_type": "minicpm3", **LATENT, "v_head_dim": 8, "q_lora_rank": 16},
    "kimi-linear": dict(
        model_type="kimi_linear",
        q_lora_rank=None,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        routed_scaling_factor=1.7,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=[LINEAR, FULL],
        **LATENT,
    ),
}
