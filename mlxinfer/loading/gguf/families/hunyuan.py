"""Hunyuan."""

from __future__ import annotations

from ..architecture import LLAMA, GGUFArchitecture, TensorTable
from ..base_config import Config, Source, dense_config


def _hunyuan(source: Source) -> Config:
    """The base of the rope includes its stretching."""
    source.hparams.take("rope.scaling.original_context_length")
    return dense_config(source, "hunyuan_v1_dense") | {"attention_bias": source.has("blk.0.attn_q.bias")}


ARCHITECTURES = {
    "hunyuan-dense": GGUFArchitecture(
        _hunyuan, TensorTable(LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"})
    ),
}
