"""Hunyuan (dense): Llama with norms on query and key heads, applied after rotation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ..block import Block, attention_specs, gated_mlp, pre_norm
from ..common import FULL, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope

HUNYUAN = {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def hunyuan_v1_dense(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, HUNYUAN)
    heads = sizes.heads
    reader.uniform_layers(FULL)
    reader.skip("eod_token_id", "attention_head_dim", "org_vocab_size")
    reader.only("use_qk_norm", True)
    reader.only("use_cla", False)
    reader.skip("cla_share_factor", "dense_list")  # for cross-layer attention, which needs use_cla
    reader.only("attention_head_dim", heads.dim)
    scaling = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or {}
    aliases = {"dynamic": "ntk_alpha"} if isinstance(scaling, dict) and scaling.get("alpha") else None
    rope = read_rope(reader, heads.dim, sizes.positions, aliases=aliases)
    bias = reader.boolean("attention_bias", False)
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        query, key = (RMSNorm.load(weights, f"{name}.self_attn.{part}_layernorm", heads.dim, sizes.eps) for part in ("query", "key"))
        # Rotation keeps a head's length, so the norm may precede it, but the norm's weights may not. A score multiplies each channel's
        # query and key weights, so the query takes their product.
        plain = mx.ones_like(query.weight)
        attention = Attention(
            layer,
            heads,
            load_qkv(weights, f"{name}.self_attn", heads, bias=bias),
            load_output(weights, f"{name}.self_attn", heads, bias=bias),
            rope=rope,
            q_norm=RMSNorm(plain, query.eps),
            k_norm=RMSNorm(plain, key.eps),
            query_gain=query.weight.astype(mx.float32) * key.weight.astype(mx.float32),
        )
        return pre_norm(weights, name, sizes, attention, gated_mlp(weights, name, sizes, gate))

    return Architecture(sizes, attention_specs(sizes, [None] * sizes.layers), {"rope": rope}, block)
