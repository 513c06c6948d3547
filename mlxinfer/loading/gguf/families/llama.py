"""Llama and its relatives with rotated queries and keys: Mixtral, Ministral 3, Granite, SmolLM3."""

from __future__ import annotations

from ..architecture import LLAMA, ROTATED, GGUFArchitecture, TensorTable, expert_names
from ..base_config import Config, Source, dense_config


def _llama(source: Source) -> Config:
    """Llama, Mistral (with a window) or Mixtral (with experts)."""
    hparams = source.hparams
    if hparams.integer("expert_count", 0, low=0):
        return _mixtral(source)
    window = hparams.integer("attention.sliding_window", 0, low=0)
    if window:
        return dense_config(source, "mistral") | {"sliding_window": window}
    hparams.integer("expert_used_count", 0, low=0)
    biases = {
        "attention_bias": source.has("blk.0.attn_q.bias") or source.has("blk.0.attn_qkv.bias"),
        "mlp_bias": source.has("blk.0.ffn_up.bias"),
    }
    return dense_config(source, "llama") | biases


def _mixtral(source: Source) -> Config:
    config = dense_config(source, "mixtral")
    return config | {
        "intermediate_size": source.hparams.integer("expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": source.hparams.integer("expert_count"),
        "num_experts_per_tok": source.hparams.integer("expert_used_count"),
        "sliding_window": None,
    }


def _mistral3(source: Source) -> Config:
    """Ministral 3. Queries grow with their position."""
    hparams = source.hparams
    config = dense_config(source, "ministral3", unit=1.0)
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    growth = hparams.number("attention.temperature_scale", 0.0)
    if growth:
        scaling["llama_4_scaling_beta"] = growth
    return config | {"rope_parameters": {**scaling, "rope_theta": config.pop("rope_theta")}}


def _granite(source: Source) -> Config:
    hparams = source.hparams
    config = dense_config(source, "granite")
    if hparams.take("rope.scaling.finetuned") is False:
        raise hparams.unsupported("rope.scaling.finetuned", "is false (a model without rope)")
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise hparams.unsupported("attention.key_length", f"is {config['head_dim']}, not embedding_length / head_count")
    return config | {
        "attention_multiplier": hparams.positive("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": hparams.positive("embedding_scale", 1.0),
        "residual_multiplier": hparams.positive("residual_scale", 1.0),
        "logits_scaling": hparams.positive("logit_scale"),
        "attention_bias": source.has("blk.0.attn_q.bias"),
        "mlp_bias": source.has("blk.0.ffn_up.bias"),
    }


def _smollm3(source: Source) -> Config:
    """Every fourth layer has no rope."""
    config = dense_config(source, "smollm3")
    no_rope = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return config | {"no_rope_layer_interval": 4, "no_rope_layers": no_rope, "use_sliding_window": False}


ARCHITECTURES = {
    "llama": GGUFArchitecture(
        _llama,
        TensorTable(LLAMA, ROTATED),
        {"mixtral": TensorTable(LLAMA | expert_names("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"), ROTATED)},
    ),
    "mistral3": GGUFArchitecture(_mistral3, TensorTable(LLAMA, ROTATED)),
    "granite": GGUFArchitecture(_granite, TensorTable(LLAMA, ROTATED)),
    "smollm3": GGUFArchitecture(_smollm3, TensorTable(LLAMA, ROTATED)),
}
