"""Llama (arXiv:2307.09288) and Mistral (arXiv:2310.06825): pre-norm blocks of rotary attention and a gated MLP."""

from __future__ import annotations

from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.weights import Weights
from ..config import ConfigReader
from ..decoder import Architecture, Block
from ..parts import attention_specs, gated_mlp, pre_norm
from ..rope_config import read_rope
from ..sizes import Sizes, read_sizes

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
MISTRAL = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}


def llama(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, LLAMA)
    attention_bias = reader.boolean("attention_bias", False)
    mlp_bias = reader.boolean("mlp_bias", False)
    return _architecture(reader, sizes, None, attention_bias, mlp_bias)


def mistral(config: dict[str, Any]) -> Architecture:
    """Without biases; every layer may see a window only."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, MISTRAL)
    window = reader.optional_integer("sliding_window", 4096)
    return _architecture(reader, sizes, window, False, False)


def _architecture(reader: ConfigReader, sizes: Sizes, window: int | None, attention_bias: bool, mlp_bias: bool) -> Architecture:
    rope = read_rope(reader, sizes.heads.dim, sizes.positions)
    reader.uniform_layers("full_attention" if window is None else "sliding_attention")
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = load_qkv(weights, f"{name}.self_attn", sizes.heads, bias=attention_bias)
        output = load_output(weights, f"{name}.self_attn", sizes.heads, bias=attention_bias)
        attention = Attention(layer, sizes.heads, qkv, output, rope=rope)
        return pre_norm(weights, name, sizes, attention, gated_mlp(weights, name, sizes, gate, bias=mlp_bias))

    return Architecture(sizes, attention_specs(sizes, [window] * sizes.layers), {"rope": rope}, block)
