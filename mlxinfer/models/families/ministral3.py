"""Ministral 3: Llama with queries scaled by position beyond the original context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, Temperature, load_output, load_qkv
from ...nn.weights import Weights
from ..block import Block, attention_specs, gated_mlp, pre_norm
from ..common import FULL, SLIDING, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope

MINISTRAL3 = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
TEMPERATURE_KEYS = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})


def ministral3(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, MINISTRAL3)
    window = reader.optional_integer("sliding_window")
    reader.uniform_layers(FULL if window is None else SLIDING)
    rope = read_rope(reader, sizes.heads.dim, sizes.positions, theta=1000000.0, otherwise=YARN, ignored=TEMPERATURE_KEYS)
    temperature = read_temperature(reader, YARN)
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = load_qkv(weights, f"{name}.self_attn", sizes.heads)
        output = load_output(weights, f"{name}.self_attn", sizes.heads)
        attention = Attention(layer, sizes.heads, qkv, output, rope=rope, temperature=temperature)
        return pre_norm(weights, name, sizes, attention, gated_mlp(weights, name, sizes, gate))

    return Architecture(sizes, attention_specs(sizes, [window] * sizes.layers), {"rope": rope}, block)


def read_temperature(reader: ConfigReader, default: Mapping[str, Any]) -> Temperature | None:
    """Read the temperature from the rope's parameters, which default to `default`."""
    own = ConfigReader(reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or default)
    beta, length = own.optional_number("llama_4_scaling_beta"), own.optional_integer("original_max_position_embeddings")
    return Temperature(beta, length) if beta and length else None
