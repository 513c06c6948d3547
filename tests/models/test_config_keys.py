"""Keys that may change answers match none of the patterns, and a stated value is accepted as exactly that value."""

from __future__ import annotations

import pytest

from mlxinfer.models.config_keys import harmless

MEANINGFUL = """
_remove_final_layer_norm _sliding_window_pattern activation_function altup_num_inputs attention_chunk_size attention_multiplier
attn_logit_softcapping attn_output_gate attn_scale attn_temperature_tuning block_sparse_moe clip_qkv conv_L_cache decoder_sparse_step
dim_model_base experts_per_token final_logit_softcapping first_k_dense_replace full_attention_interval global_head_dim head_dim
hidden_act hidden_activation hidden_size hidden_size_per_layer_input index_head_dim index_topk intermediate_size kv_lora_rank
layernorm_epsilon laurel_rank linear_attn_config logits_soft_cap mamba_d_state moe_k moe_router_activation_func moe_topk n_group
no_rope_layers norm_eps norm_topk_prob num_attention_heads num_experts_per_tok num_experts_per_token num_hidden_layers
num_key_value_heads num_kv_shared_layers output_gate_type output_logit_soft_cap output_multiplier partial_rotary_factor q_lora_rank
qk_norm_type query_pre_attn_scalar rms_norm_eps rope_local_base_freq rope_parameters rope_scaling rope_theta rotary_dim
routed_scaling_factor scale_depth scale_emb scoring_func sliding_window sliding_window_pattern swiglu_limit time_step_limit
tie_word_embeddings topk_group topk_method use_mem_rope v_head_dim value_residual vocab_size window_size
"""


@pytest.mark.parametrize("key", MEANINGFUL.split())
def test_a_key_with_a_meaning_matches_no_pattern(key: str) -> None:
    assert harmless(key, 2) is None


@pytest.mark.parametrize(
    ("key", "accepted", "refused"),
    [
        ("qkv_bias", False, [True, 0, 1, "no"]),
        ("use_rotary_pos_emb", True, [False, 1]),
        ("shared_expert_intermediate_size", 0, [False, 512]),
        ("add_classification_head", False, [True]),
        ("logits_scaling", 1.0, [2.0, True]),
        ("mlp_only_layers", [], [[3], None]),
        ("position_embedding_type", "rope", ["alibi", "absolute"]),
        ("layer_types", ["full_attention"] * 3, [["full_attention", "sliding_attention"], "full_attention"]),
        ("use_qk_norm", False, [True]),
    ],
)
def test_a_stated_value_is_accepted_as_exactly_that_value(key: str, accepted: object, refused: list[object]) -> None:
    assert harmless(key, accepted)
    assert [value for value in refused if harmless(key, value)] == []


HARMLESS = """
auto_map vision_soft_tokens_per_image block_out_init_scale model_name unsloth_fixed axolotl_config mlx_lm_version lmstudio_preset
modelopt_state quantization_config transformers.js_config router_aux_loss_coef attn_pdrop im_start_id num_nextn_predict_layers
pretraining_tp chat_template image_grid_pinpoints audio_config torch_dtype use_flash_attention hf_revision
"""


@pytest.mark.parametrize("key", HARMLESS.split())
def test_known_by_name_or_pattern(key: str) -> None:
    assert harmless(key, "anything")
