"""Cohere 2."""

from __future__ import annotations

from ..architecture import ATTENTION, MLP, GGUFArchitecture, TensorTable
from ..base_config import Config, Source, dense_config, windowed_layers


def _cohere2(source: Source) -> Config:
    """Layers without a window have no rope."""
    hparams = source.hparams
    config = dense_config(source, "cohere2", eps="attention.layer_norm_epsilon")
    return config | {
        "layer_norm_eps": config.pop("rms_norm_eps"),
        "logit_scale": hparams.positive("logit_scale"),
        "sliding_window": hparams.integer("attention.sliding_window"),
        "layer_types": windowed_layers(source, config["num_hidden_layers"], 4),
        "attention_bias": source.has("blk.0.attn_q.bias"),
    }


ARCHITECTURES = {
    "cohere2": GGUFArchitecture(_cohere2, TensorTable(ATTENTION | MLP)),
}
