"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and across all heads of queries and keys.

OLMo 3 has windows on most layers and a scaled rope on the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.norms import RMSNorm
from ...nn.rope import Rope
from ...nn.weights import Weights
from ..block import Block, Norms, attention_specs, gated_mlp
from ..common import FULL, SLIDING, Sizes, every, read_layer_types, read_sizes, windows
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope, read_rope_by_layer

OLMO2 = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def olmo2(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, OLMO2)
    reader.uniform_layers(FULL)
    types = [FULL] * sizes.layers
    return _architecture(reader, sizes, types, None, {FULL: read_rope(reader, sizes.heads.dim, sizes.positions)})


def olmo3(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, OLMO2)
    window = reader.optional_integer("sliding_window", 4096)
    types = read_layer_types(reader, (FULL, SLIDING), sizes.layers, every(4, FULL, SLIDING))
    theta = dict.fromkeys((FULL, SLIDING), ("rope_theta", 500000.0))
    ropes = read_rope_by_layer(reader, sizes.heads.dim, sizes.positions, theta=theta, scaled=FULL)
    return _architecture(reader, sizes, types, window, ropes)


def _architecture(reader: ConfigReader, sizes: Sizes, types: list[str], window: int | None, ropes: Mapping[str, Rope]) -> Architecture:
    heads = sizes.heads
    bias = reader.boolean("attention_bias", False)
    reader.only("use_qk_norm", True)
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        attention = Attention(
            layer,
            heads,
            load_qkv(weights, f"{name}.self_attn", heads, bias=bias),
            load_output(weights, f"{name}.self_attn", heads, bias=bias),
            rope=ropes[types[layer]],
            q_norm=RMSNorm.load(weights, f"{name}.self_attn.q_norm", heads.count * heads.dim, sizes.eps),
            k_norm=RMSNorm.load(weights, f"{name}.self_attn.k_norm", heads.kv * heads.dim, sizes.eps),
            wide_norms=True,
        )
        norms = Norms(
            after_mixer=RMSNorm.load(weights, f"{name}.post_attention_layernorm", sizes.hidden, sizes.eps),
            after_mlp=RMSNorm.load(weights, f"{name}.post_feedforward_layernorm", sizes.hidden, sizes.eps),
        )
        return Block(attention, gated_mlp(weights, name, sizes, gate), norms, rope=types[layer])

    return Architecture(sizes, attention_specs(sizes, windows(types, window)), ropes, block)
