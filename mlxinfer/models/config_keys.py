"""Config keys that change no answer: by name, by pattern, or by a value that states the behaviour of every graph here.

A graph first reads the keys of its family; this module judges only the remaining keys. A key that changes the maths must not match: the
model is refused and the key named.
"""

from __future__ import annotations

import re
from typing import Any

_PATTERNS: dict[str, str] = {
    "bookkeeping of transformers": r"""
        _(?!sliding_window_pattern$|remove_final_layer_norm$).*  architectures  add_cross_attention  auto_map
        finetuning_task  is_decoder  is_encoder_decoder  is_llama_config  chunk_size_feed_forward
        cross_attention_hidden_size  custom_pipelines  dtype  id2label  label2id  model_type  name_or_path  num_labels
        classifier_\w+  summary_\w+  output_(attentions|hidden_states|past|router_logits|scores)  problem_type
        pruned_heads  return_dict\w*  task_specific_params  tf_legacy_loss  tie_encoder_decoder  torch_dtype
        torchscript  transformers[._]\w+  trust_remote_code  use_return_dict
    """,
    "training and initialisation": r"""
        initializer_\w+  \w+_initializer_\w+  init_\w+  (\w+_)?init_(scale|std|method|range)  \w+_xavier_init
        rescale_prenorm_residual  (\w+_)?dropout(_\w+)?  \w+_pdrop  \w+_drop(_rate)?  (\w+_)?(aux_?|z_?)loss\w*
        \w+_loss(_\w+)?  seq_aux  aux_\w+  \w+_jitter(_\w+)?  loss_\w+  (\w+_)?layerdrop  gradient_checkpointing\w*
        pretraining_tp  (train|training)_\w+  learning_rate  lr_\w+  warmup\w*  weight_decay  adam_\w+  optimizer\w*
        (random_)?seed  (micro_)?batch_size  max_grad_norm  label_smoothing\w*  router_bias_update_\w+
        moe_capacity_factor  moe_drop_tokens  moe_random_routing_dropped_token  moe_token_drop_policy  freeze_\w+
        reset_(attention_mask|position_ids)  eod_mask_loss  ep_size
        (tensor|pipeline|sequence|expert|data|context)_(model_)?parallel\w*  \w+_parallel_(size|degree)
        \w*_te_autocast  neftune_noise_alpha  use_reentrant_checkpoint
    """,
    "generation": r"""
        bad_words_ids  begin_suppress_tokens  cache_implementation  diversity_penalty  do_sample  early_stopping
        encoder_no_repeat_ngram_size  exponential_decay_length_penalty  generation_\w+  length_penalty
        max_(new_tokens|length)  min_(length|new_tokens|p)  no_repeat_ngram_size  num_beam_groups  num_beams
        num_return_sequences  prefix  remove_invalid_values  repetition_penalty  stop_\w+  suppress_tokens
        temperature  top_[kp]  typical_p  use_cache
    """,
    "tokens, tokenizers and lengths": r"""
        (?!\w*(layer|expert|block|head))\w+_ids?  \w+_token_(id|ids|index|list)
        (bos|eos|pad|unk|sep|cls|mask|image|audio|video)_token  tokenizer\w*  special_tokens\w*  added_tokens\w*
        vocab_file  chat_template\w*  padding_side  truncation\w*  org_vocab_size  model_max_length
        max_seq(uence)?_len(gth)?  seq_len(gth)?  max_window_layers  bos_\w+_token  add_(bos|eos)_token
        im_newline_\w+  unpadded_vocab_size  pad_vocab_size_\w+  pad_to_multiple_of
    """,
    "images, audio and video": r"""
        (vision|visual|vit|video|image|img|audio|speech|mm|multimodal|projector|boi|eoi|boa|eoa)_\w+  anyres_\w+
        pooling_mode  spatial_merge_size  skip_cls_token  add_patemb  position_embedding_xdrope  xdrope_\w+
        deepstack_\w+  num_media_embeds  language_model_only  use_thumbnail  downsample_ratio  dynamic_image_size
        force_image_size  ps_version  (max|min)_(dynamic_patch|image|num_patches|pixels|tiles)\w*  pool_type
        class_num  use_vision_\w+  use_image_\w+  perceiver_config  pixel_shuffle_factor
    """,
    "heads that draft": r"""
        (num_)?mtp_\w+  num_nextn_predict_layers  mtp  nextn_\w+  use_mtp  medusa_\w+  eagle_\w+
    """,
    "programs that export, quantize or serve": r"""
        unsloth\w*  axolotl\w*  mlx\w*  lm_?studio\w*  nvidia\w*  modelopt\w*  onnx\w*  coreml\w*  openvino\w*
        vllm\w*  sglang\w*  trt\w*  tensorrt\w*  deepspeed\w*  fsdp\w*  peft\w*  wandb\w*  ort_\w+  megatron\w*
        nemo_\w+  quantization(_\w+)?  compression_config  kv_cache_\w*  sparsity_config  adapter_path  base_model\w*
        model_(name|id|version|card|size)  model_name_or_path  finetuned_(from|model)\w*  merged_from  source_model\w*
        converted_\w+  export_\w+  license\w*  authors?  description  version  revision  commit\w*  git_\w+  date
        created_\w+  hf_\w+  tags  language  languages  pipeline_tag  library_name  sentence_transformers
        matryoshka_\w+  prompts  \w*use_quantized_params  fp8_\w+
    """,
    "the way of computing the same": r"""
        \w*attn_implementation\w*  experts_implementation  use_(fused|flash|kernel|liger|triton)\w*
        use_(mem_eff_path|memory_efficient_attention|mamba_kernels|te)  flash_attn\w*  flash_attention\w*  fused_\w+
        \w+_in_fp32  apply_residual_connection_post_fp32  (use_)?bfloat16  (bf|fp)(16|32)  (num_)?logits_to_keep
        (moe_)?router_dtype  use_cache_\w+  mamba_chunk_size  mamba_ssm_cache_dtype  moe_shared_expert_overlap
        moe_grouped_gemm  moe_permute_fusion  use_torch_\w+  masked_softmax_fusion  use_cpu_initialization  sdpa_\w+
        eager_\w+
    """,
}
"""Reason why keys change no answer, to regular expressions of whole names."""

_KNOWN = {reason: re.compile("|".join(f"(?:{name})" for name in names.split())) for reason, names in _PATTERNS.items()}

_OFF_KEYS = """
add_bias add_bias_linear add_classification_head add_qkv_bias alibi attention_bias attention_in_bias attention_out_bias
attention_output_bias attention_sinks bias ffn_bias gated_attention_bias lm_head_bias mlp_bias moe_gating_bias o_bias out_bias
parallel_attn qk_layer_norms qk_norm qkv_bias rope_interleaved rope_traditional rotary_interleaved router_bias use_alibi use_attention_bias
use_attention_sinks use_bias use_bidirectional_attention use_cla use_dynamic_ntk use_logn_attn use_mixed_mlp_moe use_mla
use_mlp_bias use_moe use_mrope use_parallel_residual use_qk_norm use_qkv_bias use_resampler use_sliding_window
"""
_ON_KEYS = "is_causal use_pos_enc use_rope use_rotary_embedding use_rotary_pos_emb"
_ONE_KEYS = "embedding_multiplier logit_scale logits_scaling residual_multiplier rope_ratio rotary_pct rotary_percent"
_NONE_KEYS = """
moe_intermediate_size moe_num_experts n_routed_experts n_shared_experts num_experts num_local_experts num_shared_experts
shared_expert_intermediate_size
"""
_STATED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF_KEYS.split(), (False,)),
    **dict.fromkeys(_ON_KEYS.split(), (True,)),
    **dict.fromkeys(_ONE_KEYS.split(), (1,)),
    **dict.fromkeys(_NONE_KEYS.split(), (0,)),
    "attention_type": ("full", "full_attention"),
    "mlp_only_layers": ([],),
    "norm_type": ("hf_rms", "rms", "rms_norm", "rmsnorm"),
    "position_embedding_type": ("rope", "rotary"),
    "rope_type": ("default",),
    "rotary_type": ("default",),
}
"""Keys to the values under which they change no answer of a graph that does not read them."""


def harmless(key: str, value: object) -> str | None:
    """Return the reason why an unread key changes no answer; None if it may change one."""
    if key in _STATED:
        return f"{value!r} is what the graph does anyway" if _is_stated(key, value) else None
    if key == "layer_types":
        return "every layer attends to everything" if _all_full(value) else None
    return next((reason for reason, known in _KNOWN.items() if known.fullmatch(key)), None)


def _is_stated(key: str, value: object) -> bool:
    # In Python 1 == True, and 0 == False.
    return any(value == stated and isinstance(value, bool) == isinstance(stated, bool) for stated in _STATED[key])


def _all_full(value: object) -> bool:
    return isinstance(value, list) and all(kind == "full_attention" for kind in value)
