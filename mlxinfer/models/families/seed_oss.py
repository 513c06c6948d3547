"""Seed-OSS: Llama with biases on queries, keys and values, and optionally on the attention's output."""

from __future__ import annotations

from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.weights import Weights
from ..block import Block, attention_specs, gated_mlp, pre_norm
from ..common import FULL, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope

SEED_OSS = {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
}


def seed_oss(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, SEED_OSS)
    reader.uniform_layers(FULL)
    rope = read_rope(reader, sizes.heads.dim, sizes.positions)
    bias, output_bias = reader.boolean("attention_bias", True), reader.boolean("attention_out_bias", False)
    mlp_bias = reader.boolean("mlp_bias", False)
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = load_qkv(weights, f"{name}.self_attn", sizes.heads, bias=bias)
        output = load_output(weights, f"{name}.self_attn", sizes.heads, bias=output_bias)
        attention = Attention(layer, sizes.heads, qkv, output, rope=rope)
        return pre_norm(weights, name, sizes, attention, gated_mlp(weights, name, sizes, gate, bias=mlp_bias))

    return Architecture(sizes, attention_specs(sizes, [None] * sizes.layers), {"rope": rope}, block)
