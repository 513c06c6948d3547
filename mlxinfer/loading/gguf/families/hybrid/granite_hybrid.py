"""Granite 4."""

from __future__ import annotations

from ...architecture import ATTENTION, ROTATED, GGUFArchitecture, TensorTable, expert_names
from ...base_config import Config, Source, dense_config, layer_types
from .mamba2 import MAMBA_TRANSFORMS, mamba_config, mamba_names


def _granite_hybrid(source: Source) -> Config:
    hparams = source.hparams
    config = dense_config(source, "granitemoehybrid")
    layers, experts = config["num_hidden_layers"], hparams.integer("expert_count", 0, low=0)
    inner = config["intermediate_size"]
    shared = hparams.integer("expert_shared_feed_forward_length", inner, low=0)
    return config | {
        "layer_types": layer_types(source, layers),
        "position_embedding_type": "nope" if hparams.take("rope.scaling.finetuned") is False else "rope",
        "shared_intermediate_size": shared if experts else inner,
        "num_local_experts": experts,
        "num_experts_per_tok": hparams.integer("expert_used_count", 0, low=0),
        "attention_multiplier": hparams.positive("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": hparams.positive("embedding_scale", 1.0),
        "residual_multiplier": hparams.positive("residual_scale", 1.0),
        "logits_scaling": hparams.positive("logit_scale", 1.0),
        **mamba_config(source, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
        "mamba_expand": max(1, hparams.integer("ssm.inner_size") // config["hidden_size"]),
        "mamba_conv_bias": source.has_any("ssm_conv1d.bias"),
    }


ARCHITECTURES = {
    "granitehybrid": GGUFArchitecture(
        _granite_hybrid,
        TensorTable(
            ATTENTION
            | mamba_names("mamba")
            | expert_names("block_sparse_moe.router.layer", "block_sparse_moe.switch_mlp")
            | {
                "ffn_norm": "post_attention_layernorm",
                "ffn_gate": "shared_mlp.input_linear",
                "ffn_gate_shexp": "shared_mlp.input_linear",
                "ffn_down": "shared_mlp.output_linear",
                "ffn_down_shexp": "shared_mlp.output_linear",
            },
            MAMBA_TRANSFORMS | ROTATED,
            joined={f"ffn_{part}{end}": (f"ffn_gate{end}", f"ffn_up{end}") for part in ("gate", "up") for end in ("", "_shexp")},
        ),
    ),
}
