"""LFM2."""

from __future__ import annotations

from ...architecture import MODEL, QKV, GGUFArchitecture, TensorTable, expert_names
from ...base_config import SIGMOID, Config, Source, check_scores, dense_config, layer_types
from ...transforms import conv_kernel


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
        "layer_types": layer_types(source, config["num_hidden_layers"], "conv"),
    }


_SHORT_CONV = {
    **QKV,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_MODEL = MODEL | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}


ARCHITECTURES = {
    "lfm2": GGUFArchitecture(
        _lfm2,
        TensorTable(
            _SHORT_CONV | {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
            {"shortconv.conv": conv_kernel(grouped=False)},
            _LFM2_MODEL,
        ),
    ),
    "lfm2moe": GGUFArchitecture(
        _lfm2_moe,
        TensorTable(
            _SHORT_CONV
            | expert_names("feed_forward.gate", "feed_forward.switch_mlp")
            | {"exp_probs_b.bias": "feed_forward.expert_bias"}
            | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            {"shortconv.conv": conv_kernel(grouped=False)},
            _LFM2_MODEL,
        ),
    ),
}
