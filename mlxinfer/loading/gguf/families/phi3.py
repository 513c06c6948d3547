"""Phi 3 and 4."""

from __future__ import annotations

from ..architecture import LLAMA, GGUFArchitecture, TensorTable
from ..base_config import Config, Source, base_config


def _phi3(source: Source) -> Config:
    config = base_config(source, "phi3", partial_rope=True)
    window = source.hparams.integer("attention.sliding_window", 0, low=0)
    trained = source.hparams.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return config | {
        "intermediate_size": source.hparams.integer("feed_forward_length"),
        "hidden_act": "silu",
        "sliding_window": window or None,
        "original_max_position_embeddings": trained,
    }


ARCHITECTURES = {
    "phi3": GGUFArchitecture(_phi3, TensorTable(LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})),
}
