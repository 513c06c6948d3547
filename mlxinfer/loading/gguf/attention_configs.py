"""Configs of architectures that attend to keys and values of their own, rebuilt from GGUF files: what is newer than `arch_configs.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .base_config import FREQUENCY_DIVISORS, Config, Source, base_config, dense_config, windowed_layers

SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers for how the scores of experts are made."""
_UNROTATED = 1e29
"""Divisors above this stand for channels that do not rotate."""


def _mistral3(source: Source) -> Config:
    """Ministral 3, whose queries grow with their position."""
    hparams = source.hparams
    config = dense_config(source, "ministral3", unit=1.0)
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    growth = hparams.number("attention.temperature_scale", 0.0)
    if growth:
        scaling["llama_4_scaling_beta"] = growth
    return config | {"rope_parameters": {**scaling, "rope_theta": config.pop("rope_theta")}}


def _olmo(source: Source) -> Config:
    """OLMo 2, and OLMo 3, which has windows, and stretches the rope of the other layers only."""
    hparams = source.hparams
    window = hparams.integer("attention.sliding_window", 0, low=0)
    config = dense_config(source, "olmo3" if window else "olmo2") | {"attention_bias": False}
    if not window:
        return config
    scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
    local = hparams.positive("rope.freq_base_swa", theta)
    ropes = {
        "full_attention": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    types = windowed_layers(source, config["num_hidden_layers"], 4)
    return config | {"rope_parameters": ropes, "sliding_window": window, "layer_types": types}


def _glm4(source: Source) -> Config:
    return dense_config(source, "glm4", partial_rope=True) | {"attention_bias": source.has("blk.0.attn_q.bias")}


def _glm4_moe(source: Source) -> Config:
    config = dense_config(source, "glm4_moe", partial_rope=True) | read_experts(source, SIGMOID)
    return config | {"attention_bias": source.has("blk.0.attn_q.bias"), "use_qk_norm": source.has("blk.0.attn_q_norm.weight")}


def _cohere2(source: Source) -> Config:
    """Layers without a window do not rotate."""
    hparams = source.hparams
    config = dense_config(source, "cohere2", eps="attention.layer_norm_epsilon")
    return config | {
        "layer_norm_eps": config.pop("rms_norm_eps"),
        "logit_scale": hparams.positive("logit_scale"),
        "sliding_window": hparams.integer("attention.sliding_window"),
        "layer_types": windowed_layers(source, config["num_hidden_layers"], 4),
        "attention_bias": source.has("blk.0.attn_q.bias"),
    }


def _exaone4(source: Source) -> Config:
    config = dense_config(source, "exaone4")
    window, layers = source.hparams.integer("attention.sliding_window", 0, low=0), config["num_hidden_layers"]
    types = windowed_layers(source, layers, 4) if window else ["full_attention"] * layers
    return config | {"sliding_window": window or None, "layer_types": types}


def _hunyuan(source: Source) -> Config:
    """What stretches the rope is in its base."""
    source.hparams.take("rope.scaling.original_context_length")
    return dense_config(source, "hunyuan_v1_dense") | {"attention_bias": source.has("blk.0.attn_q.bias")}


def _seed_oss(source: Source) -> Config:
    biases = {"attention_bias": source.has("blk.0.attn_q.bias"), "attention_out_bias": source.has("blk.0.attn_output.bias")}
    return dense_config(source, "seed_oss") | biases | {"mlp_bias": source.has("blk.0.ffn_up.bias")}


def _ernie(source: Source) -> Config:
    return dense_config(source, "ernie4_5") | {"use_bias": source.has("blk.0.attn_q.bias")}


def _ernie_moe(source: Source) -> Config:
    """The file states what llama.cpp takes for the width of the shared experts; theirs is a multiple of the others'."""
    hparams = source.hparams
    hparams.take("expert_shared_feed_forward_length")
    return dense_config(source, "ernie4_5_moe") | {
        "use_bias": source.has("blk.0.attn_q.bias"),
        "moe_num_experts": hparams.integer("expert_count"),
        "moe_k": hparams.integer("expert_used_count"),
        "moe_intermediate_size": hparams.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": hparams.integer("expert_shared_count", 0, low=0),
        "moe_layer_start_index": hparams.integer("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": hparams.integer("interleave_moe_layer_step", 1),
    }


def _minimax(source: Source) -> Config:
    hparams = source.hparams
    config = base_config(source, "minimax_m2", partial_rope=True)
    hparams.integer("feed_forward_length", 1)
    check_scores(source, SIGMOID)
    return config | {
        "hidden_act": "silu",
        "rotary_dim": int(config.pop("partial_rotary_factor") * config["head_dim"]),
        "intermediate_size": hparams.integer("expert_feed_forward_length"),
        "num_local_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
    }


def read_experts(source: Source, scores: int) -> Config:
    """The keys of DeepSeek V3's experts and of what is built alike. Raises `UnsupportedModelError` where scores are made otherwise."""
    hparams = source.hparams
    check_scores(source, scores)
    return {
        "n_routed_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
        "moe_intermediate_size": hparams.integer("expert_feed_forward_length"),
        "n_shared_experts": hparams.integer("expert_shared_count", 0, low=0),
        "first_k_dense_replace": hparams.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": hparams.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(hparams.take("expert_weights_norm", False)),
        "n_group": hparams.integer("expert_group_count", 1, low=0) or 1,
        "topk_group": hparams.integer("expert_group_used_count", 1, low=0) or 1,
    }


def check_scores(source: Source, scores: int) -> None:
    """Accept only experts whose scores are made like this, or as the file does not say."""
    found = source.hparams.integer("expert_gating_func", scores, low=0)
    if found not in (0, scores):
        raise source.hparams.unsupported("expert_gating_func", f"is {found}")


def _gemma4(source: Source) -> Config:
    hparams = source.hparams
    wide = hparams.integer("attention.key_length")
    narrow = hparams.integer("attention.key_length_swa", wide)
    for key, size in (("attention.value_length", wide), ("attention.value_length_swa", narrow), ("rope.dimension_count_swa", narrow)):
        if hparams.integer(key, size) != size:
            raise hparams.unsupported(key, f"is not {size}, as of keys")
    inner = hparams.per_layer("feed_forward_length")
    layers = hparams.integer("block_count")
    types = windowed_layers(source, layers, 6)
    full = types.index("full_attention") if "full_attention" in types else 0
    sliding = types.index("sliding_attention") if "sliding_attention" in types else 0
    kv = hparams.per_layer("attention.head_count_kv", layers)
    config = base_config(source, "gemma4_text", head_dim=narrow, ropeless=True, kv_heads=kv[sliding] if kv else None)
    shared = hparams.integer("attention.shared_kv_layers", 0, low=0)
    cap = hparams.number("final_logit_softcapping", 0.0)
    own = hparams.integer("embedding_length_per_layer_input", 0, low=0)
    found = config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": inner[0] if inner else hparams.integer("feed_forward_length"),
        "use_double_wide_mlp": bool(inner and shared and inner[-1] == 2 * inner[0]),
        "global_head_dim": wide,
        "num_global_key_value_heads": kv[full] if kv else None,
        "attention_k_eq_v": not source.has(f"blk.{full}.attn_v.weight"),
        "layer_types": types,
        "sliding_window": hparams.integer("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": own,
        "vocab_size_per_layer_input": source.rows("per_layer_token_embd.weight") if own else config["vocab_size"],
        "final_logit_softcapping": cap or None,
        "rope_parameters": _gemma4_ropes(source, wide),
    }
    return found | _gemma4_experts(source)


def _gemma4_ropes(source: Source, wide: int) -> Mapping[str, Any]:
    """The share of a wide head that rotates comes as divisors so large that the rest stands still."""
    hparams = source.hparams
    hparams.integer("rope.dimension_count", wide)
    divisors = source.files.floats(FREQUENCY_DIVISORS) if source.has(FREQUENCY_DIVISORS) else [1.0] * (wide // 2)
    turned = sum(value < _UNROTATED for value in divisors)
    if len(divisors) != wide // 2 or any(value != 1.0 for value in divisors[:turned]):
        raise hparams.unsupported("rope.dimension_count", f"comes with divisors of the frequencies other than 1 ({FREQUENCY_DIVISORS})")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * turned / wide,
            "rope_theta": hparams.positive("rope.freq_base", 1000000.0),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": hparams.positive("rope.freq_base_swa", 10000.0)},
    }


def _gemma4_experts(source: Source) -> Config:
    hparams = source.hparams
    if not hparams.integer("expert_count", 0, low=0):
        hparams.take("expert_used_count")
        hparams.take("expert_feed_forward_length")
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": hparams.integer("expert_count"),
        "top_k_experts": hparams.integer("expert_used_count"),
        "moe_intermediate_size": hparams.integer("expert_feed_forward_length"),
    }


ATTENTION_BUILDERS: dict[str, Callable[[Source], Config]] = {
    "olmo2": _olmo,
    "mistral3": _mistral3,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "hunyuan-dense": _hunyuan,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "minimax-m2": _minimax,
    "gemma4": _gemma4,
}
