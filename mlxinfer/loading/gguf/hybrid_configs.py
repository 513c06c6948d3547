"""Configs of architectures whose layers keep a state or a latent vector, rebuilt from GGUF files."""

from __future__ import annotations

from collections.abc import Callable

from .attention_configs import SIGMOID, SOFTMAX, check_scores, read_experts
from .base_config import Config, Source, attends, base_config, dense_config

_YARN_UNIT = 0.1
"""DeepSeek's files hold a tenth of `mscale_all_dim`."""
_KINDS = {True: "full_attention", False: "linear_attention"}


def _deepseek(source: Source) -> Config:
    """DeepSeek V2 where experts are chosen by probabilities; V3, which GLM-4.7-Flash is built like, where by a sigmoid."""
    hparams = source.hparams
    scores = hparams.integer("expert_gating_func", 0, low=0) or (SIGMOID if source.has_any("exp_probs_b.bias") else SOFTMAX)
    name = "deepseek_v2" if scores == SOFTMAX else "deepseek_v3"
    config = _latent(source, name, _YARN_UNIT) | read_experts(source, scores)
    if scores == SOFTMAX:
        config |= {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}
        if config.pop("norm_topk_prob"):
            raise hparams.unsupported("expert_weights_norm", "is true for experts that are chosen by probabilities")
    return config


def _mistral4(source: Source) -> Config:
    config = _latent(source, "mistral4", _YARN_UNIT) | read_experts(source, SOFTMAX)
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    growth = source.hparams.number("attention.temperature_scale", 0.0)
    if growth:
        raise source.hparams.unsupported("attention.temperature_scale", f"is {growth}")
    return config | {"rope_parameters": {**scaling, "rope_theta": config.pop("rope_theta")}}


def _minicpm3(source: Source) -> Config:
    """The constant factors are as llama.cpp has them in its code."""
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


def _kimi_linear(source: Source) -> Config:
    hparams = source.hparams
    config = _latent(source, "kimi_linear", None) | read_experts(source, SIGMOID)
    layers, dense = config["num_hidden_layers"], config.pop("first_k_dense_replace")
    linear = attends(source, layers).index(False) if False in attends(source, layers) else 0
    dim = hparams.integer("kda.head_dim")
    return config | {
        "norm_topk_prob": True,
        "layer_types": [_KINDS[flag] for flag in attends(source, layers)],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "linear_conv_kernel_dim": hparams.integer("ssm.conv_kernel"),
        "linear_head_dim": dim,
        "linear_num_heads": source.rows(f"blk.{linear}.attn_q.weight") // dim,
    }


def _latent(source: Source, model_type: str, unit: float | None) -> Config:
    """Latent attention: the file's heads are those that meet the latent vector, `_mla` the model's own. Files of before 2025 have only
    these, and one matrix from the latent vector to all heads."""
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


def _granite_hybrid(source: Source) -> Config:
    hparams = source.hparams
    config = dense_config(source, "granitemoehybrid")
    layers, experts = config["num_hidden_layers"], hparams.integer("expert_count", 0, low=0)
    inner = config["intermediate_size"]
    shared = hparams.integer("expert_shared_feed_forward_length", inner, low=0)
    return config | {
        "layer_types": [_KINDS[flag] for flag in attends(source, layers)],
        "position_embedding_type": "nope" if hparams.take("rope.scaling.finetuned") is False else "rope",
        "shared_intermediate_size": shared if experts else inner,
        "num_local_experts": experts,
        "num_experts_per_tok": hparams.integer("expert_used_count", 0, low=0),
        "attention_multiplier": hparams.positive("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": hparams.positive("embedding_scale", 1.0),
        "residual_multiplier": hparams.positive("residual_scale", 1.0),
        "logits_scaling": hparams.positive("logit_scale", 1.0),
        **_mamba(source, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
        "mamba_expand": max(1, hparams.integer("ssm.inner_size") // config["hidden_size"]),
        "mamba_conv_bias": source.has_any("ssm_conv1d.bias"),
    }


def _mamba(source: Source, heads: str, dim: str, state: str, groups: str, taps: str) -> Config:
    """A Mamba 2 layer's sizes, by the names that a family's config has for them."""
    hparams = source.hparams
    count, inner = hparams.integer("ssm.time_step_rank"), hparams.integer("ssm.inner_size")
    if inner % count:
        raise hparams.error("ssm.inner_size", f"is {inner}, not a multiple of the {count} heads")
    return {
        heads: count,
        dim: inner // count,
        state: hparams.integer("ssm.state_size"),
        groups: hparams.integer("ssm.group_count", 1),
        taps: hparams.integer("ssm.conv_kernel"),
    }


def _nemotron_h(source: Source) -> Config:
    """Each layer is one part: attention where it has KV heads, a feed-forward layer where it has channels for one, Mamba 2 else."""
    hparams = source.hparams
    inner = hparams.per_layer("feed_forward_length") or []
    rms = "attention.layer_norm_rms_epsilon"
    hparams.take("attention.layer_norm_epsilon")
    config = base_config(source, "nemotron_h", ropeless=True, eps=rms if hparams.has(rms) else "attention.layer_norm_epsilon")
    layers = config["num_hidden_layers"]
    if len(inner) < layers:
        raise hparams.error("feed_forward_length", f"must hold a number for each of the {layers} layers")
    moe = hparams.integer("expert_count", 0, low=0)
    fed = "E" if moe else "-"
    letters = ["*" if flag else fed if inner[layer] else "M" for layer, flag in enumerate(attends(source, layers))]
    for key in ("rope.dimension_count", "rope.freq_base"):
        hparams.take(key)
    found = config | {
        "hybrid_override_pattern": "".join(letters),
        "intermediate_size": max(inner) or 1,
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "use_conv_bias": source.has_any("ssm_conv1d.bias"),
        "mlp_bias": source.has_any("ffn_up.bias"),
        **_mamba(source, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    }
    return found | (_nemotron_experts(source) if moe else {})


def _nemotron_experts(source: Source) -> Config:
    hparams = source.hparams
    latent = hparams.optional_integer("moe_latent_size")
    return {key: value for key, value in read_experts(source, SIGMOID).items() if key != "first_k_dense_replace"} | {
        "moe_shared_expert_intermediate_size": hparams.integer("expert_shared_feed_forward_length", 0, low=0),
        "moe_latent_size": latent,
    }


def _falcon_h1(source: Source) -> Config:
    """The constant factors are in the weights; the norm, where there is one, comes after the gate."""
    return dense_config(source, "falcon_h1") | {
        **_mamba(source, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
        "mamba_d_ssm": source.hparams.integer("ssm.inner_size"),
        "mamba_conv_bias": source.has_any("ssm_conv1d.bias"),
        "mamba_rms_norm": source.has_any("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **dict.fromkeys(_FALCON_FACTORS, 1.0),
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }


_FALCON_FACTORS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "key_multiplier",
)


def _lfm2(source: Source) -> Config:
    config = _short_conv(source, "lfm2")
    return config | {"block_auto_adjust_ff_dim": False}


def _lfm2_moe(source: Source) -> Config:
    hparams = source.hparams
    check_scores(source, SIGMOID)
    return _short_conv(source, "lfm2_moe") | {
        "num_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
        "moe_intermediate_size": hparams.integer("expert_feed_forward_length"),
        "num_dense_layers": hparams.integer("leading_dense_block_count", 0, low=0),
        "use_expert_bias": source.has_any("exp_probs_b.bias"),
        "norm_topk_prob": hparams.boolean("expert_weights_norm", True),
        "routed_scaling_factor": hparams.number("expert_weights_scale", 1.0) or 1.0,
    }


def _short_conv(source: Source, model_type: str) -> Config:
    if source.hparams.integer("attention.sliding_window", 0, low=0):
        raise source.hparams.unsupported("attention.sliding_window", "is set")
    config = dense_config(source, model_type)
    return config | {
        "norm_eps": config.pop("rms_norm_eps"),
        "conv_L_cache": source.hparams.integer("shortconv.l_cache"),
        "conv_bias": source.has_any("shortconv.conv.bias"),
        "layer_types": ["full_attention" if flag else "conv" for flag in attends(source, config["num_hidden_layers"])],
    }


HYBRID_BUILDERS: dict[str, Callable[[Source], Config]] = {
    "deepseek2": _deepseek,
    "mistral4": _mistral4,
    "minicpm3": _minicpm3,
    "kimi-linear": _kimi_linear,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "falcon-h1": _falcon_h1,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
}
