"""gpt-oss."""

from __future__ import annotations

from ..architecture import ATTENTION, GGUFArchitecture, TensorTable, expert_names
from ..base_config import Config, Source, base_config, windowed_layers


def _gpt_oss(source: Source) -> Config:
    hparams = source.hparams
    config = base_config(source, "gpt_oss")
    if config["rope_scaling"] and config["rope_scaling"]["rope_type"] == "yarn":
        config["rope_scaling"]["truncate"] = False
    hparams.integer("feed_forward_length")
    return config | {
        "intermediate_size": hparams.integer("expert_feed_forward_length"),
        "num_local_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
        "sliding_window": hparams.integer("attention.sliding_window"),
        "layer_types": windowed_layers(source, config["num_hidden_layers"], 2),
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
    }


ARCHITECTURES = {
    "gpt-oss": GGUFArchitecture(
        _gpt_oss,
        TensorTable(
            ATTENTION
            | expert_names("mlp.router", "mlp.experts")
            | {"attn_sinks.weight": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"}
        ),
    ),
}
