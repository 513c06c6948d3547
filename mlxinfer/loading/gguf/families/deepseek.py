"""Latent attention: DeepSeek, Mistral 4, MiniCPM 3."""

from __future__ import annotations

from ..architecture import BIASED, EXPERTS, MLP, GGUFArchitecture, TensorTable, shared_expert_names
from ..base_config import SIGMOID, SOFTMAX, Config, Source, base_config, read_experts

_YARN_UNIT = 0.1
"""The file has a tenth of `mscale_all_dim`."""


def _deepseek(source: Source) -> Config:
    """DeepSeek V2 if a softmax scores the experts; V3, and GLM-4.7-Flash alike, if a sigmoid does."""
    hparams = source.hparams
    scores = hparams.integer("expert_gating_func", 0, low=0) or (SIGMOID if source.has_any("exp_probs_b.bias") else SOFTMAX)
    name = "deepseek_v2" if scores == SOFTMAX else "deepseek_v3"
    config = latent_config(source, name, _YARN_UNIT) | read_experts(source, scores)
    if scores == SOFTMAX:
        config |= {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}
        if config.pop("norm_topk_prob"):
            raise hparams.unsupported("expert_weights_norm", "is true for experts that are chosen by probabilities")
    return config


def _mistral4(source: Source) -> Config:
    config = latent_config(source, "mistral4", _YARN_UNIT) | read_experts(source, SOFTMAX)
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    growth = source.hparams.number("attention.temperature_scale", 0.0)
    if growth:
        raise source.hparams.unsupported("attention.temperature_scale", f"is {growth}")
    return config | {"rope_parameters": {**scaling, "rope_theta": config.pop("rope_theta")}}


def _minicpm3(source: Source) -> Config:
    """The constant factors are those of llama.cpp's code."""
    hparams = source.hparams
    turned = hparams.integer("rope.dimension_count")
    config = base_config(source, "minicpm3", head_dim=turned)
    return config | {
        "intermediate_size": hparams.integer("feed_forward_length"),
        "hidden_act": "silu",
        "q_lora_rank": hparams.integer("attention.q_lora_rank"),
        "kv_lora_rank": hparams.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": hparams.integer("attention.key_length") - turned,
        "v_head_dim": hparams.integer("attention.value_length", config["hidden_size"] // config["num_attention_heads"]),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def latent_config(source: Source, model_type: str, unit: float | None) -> Config:
    """Config of latent attention. `unit` as for `base_config`.

    Keys that end in `_mla` have the model's own heads, the others those that meet the latent vector. Files of before 2025 have only the
    model's own, and one matrix from the latent vector to all heads.
    """
    hparams = source.hparams
    turned, latent = hparams.integer("rope.dimension_count"), hparams.integer("attention.kv_lora_rank")
    end = "_mla" if hparams.has("attention.key_length_mla") else ""
    whole, value = hparams.integer(f"attention.key_length{end}"), hparams.integer(f"attention.value_length{end}")
    if whole <= turned:
        raise hparams.error(f"attention.key_length{end}", f"must be above rope.dimension_count, {turned}")
    if end:
        hparams.take("attention.key_length")
        hparams.take("attention.value_length")
    config = base_config(source, model_type, head_dim=turned, unit=unit)
    return config | {
        "num_key_value_heads": config["num_attention_heads"],
        "intermediate_size": hparams.integer("feed_forward_length"),
        "hidden_act": "silu",
        "q_lora_rank": hparams.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": latent,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": whole - turned,
        "v_head_dim": value,
    }


LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **MLP,
}
DEEPSEEK = LATENT | EXPERTS | shared_expert_names("mlp.shared_experts") | BIASED


ARCHITECTURES = {
    "deepseek2": GGUFArchitecture(_deepseek, TensorTable(DEEPSEEK)),
    "mistral4": GGUFArchitecture(_mistral4, TensorTable(DEEPSEEK)),
    "minicpm3": GGUFArchitecture(_minicpm3, TensorTable(LATENT)),
}
