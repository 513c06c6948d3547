"""Seed-OSS."""

from __future__ import annotations

from ..architecture import POST_NORM, GGUFArchitecture, TensorTable
from ..base_config import Config, Source, dense_config


def _seed_oss(source: Source) -> Config:
    biases = {"attention_bias": source.has("blk.0.attn_q.bias"), "attention_out_bias": source.has("blk.0.attn_output.bias")}
    return dense_config(source, "seed_oss") | biases | {"mlp_bias": source.has("blk.0.ffn_up.bias")}


ARCHITECTURES = {
    "seed_oss": GGUFArchitecture(_seed_oss, TensorTable(POST_NORM)),
}
