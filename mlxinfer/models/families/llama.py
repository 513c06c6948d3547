"""Llama (arXiv:2307.09288), Mistral (arXiv:2310.06825), Granite and SmolLM3: pre-norm blocks of attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.weights import Weights
from ..block import Block, attention_specs, gated_mlp, pre_norm
from ..common import FULL, SLIDING, Sizes, read_layer_types, read_sizes, windows
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
MISTRAL = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SMOLLM3 = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}


def llama(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, LLAMA)
    reader.uniform_layers(FULL)
    return _architecture(reader, sizes, [None] * sizes.layers)


def mistral(config: dict[str, Any]) -> Architecture:
    """Build Mistral: Llama with an optional window in every layer."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, MISTRAL)
    window = reader.optional_integer("sliding_window", 4096)
    reader.uniform_layers(FULL if window is None else SLIDING)
    return _architecture(reader, sizes, [window] * sizes.layers, may_have_biases=False)


def granite(config: dict[str, Any]) -> Architecture:
    """Build Granite: Llama with constant factors on embedding, attention, residual and logits."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, LLAMA)
    return _architecture(
        reader,
        sizes,
        [None] * sizes.layers,
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        attention_scale=reader.number("attention_multiplier", 1.0),
        residual=reader.number("residual_multiplier", 1.0),
        logit_scale=1 / reader.nonzero("logits_scaling", 1.0),
    )


def smollm3(config: dict[str, Any]) -> Architecture:
    """Build SmolLM3: some layers, by default every fourth, have no positions; only these may have a window."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, SMOLLM3)
    interval = reader.integer("no_rope_layer_interval", 4)
    rotates = reader.integers("no_rope_layers", sizes.layers) or [(layer + 1) % interval for layer in range(sizes.layers)]
    reader.skip("max_window_layers")
    window = reader.optional_integer("sliding_window")
    slides = reader.boolean("use_sliding_window", False) and window is not None
    types = read_layer_types(reader, (FULL, SLIDING), sizes.layers, lambda layer: SLIDING if slides and not rotates[layer] else FULL)
    return _architecture(reader, sizes, windows(types, window), rotates=[bool(flag) for flag in rotates], theta=2000000.0)


def _architecture(
    reader: ConfigReader,
    sizes: Sizes,
    seen: Sequence[int | None],
    *,
    may_have_biases: bool = True,
    rotates: Sequence[bool] | None = None,
    theta: float = 10000.0,
    attention_scale: float | None = None,
    residual: float = 1.0,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
) -> Architecture:
    rope = read_rope(reader, sizes.heads.dim, sizes.positions, theta=theta)
    attention_bias = may_have_biases and reader.boolean("attention_bias", False)
    mlp_bias = may_have_biases and reader.boolean("mlp_bias", False)
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        own_rope = rope if rotates is None or rotates[layer] else None
        qkv = load_qkv(weights, f"{name}.self_attn", sizes.heads, bias=attention_bias)
        output = load_output(weights, f"{name}.self_attn", sizes.heads, bias=attention_bias)
        attention = Attention(layer, sizes.heads, qkv, output, rope=own_rope, scale=attention_scale)
        mlp = gated_mlp(weights, name, sizes, gate, bias=mlp_bias)
        return pre_norm(weights, name, sizes, attention, mlp, rope="rope" if own_rope else None, residual=residual)

    specs = attention_specs(sizes, seen)
    return Architecture(sizes, specs, {"rope": rope}, block, embedding_scale=embedding_scale, logit_scale=logit_scale)
