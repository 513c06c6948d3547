"""Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..architecture import MODEL, SANDWICH, GGUFArchitecture, TensorTable, expert_names
from ..base_config import FREQUENCY_DIVISORS, Config, Source, base_config, windowed_layers

_UNROTATED = 1e29
"""Divisors above this belong to channels that do not rotate."""


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
        "use_bidirectional_attention": None if own else "vision",  # the file does not say; models with per-layer inputs are causal
    }
    return found | _gemma4_experts(source)


def _gemma4_ropes(source: Source, wide: int) -> Mapping[str, Any]:
    """Derive the rotated share of a wide head: its other channels have huge divisors, so they do not rotate."""
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


ARCHITECTURES = {
    "gemma4": GGUFArchitecture(
        _gemma4,
        TensorTable(
            SANDWICH
            | expert_names("router.proj", "experts.switch_glu")
            | {
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
                "layer_output_scale.weight": "layer_scalar",
                "inp_gate": "per_layer_input_gate",
                "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm",
            },
            model=MODEL
            | {
                "per_layer_token_embd": "model.embed_tokens_per_layer",
                "per_layer_model_proj": "model.per_layer_model_projection",
                "per_layer_proj_norm": "model.per_layer_projection_norm",
            },
        ),
    ),
}
