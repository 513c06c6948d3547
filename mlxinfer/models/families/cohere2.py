"""Command R7B and A (Cohere 2): attention and MLP read the same normed rows.

Layers with windows rotate adjacent pairs; the others have no positions.
"""

from __future__ import annotations

from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.norms import LayerNorm
from ...nn.weights import Weights
from ..block import ParallelBlock, attention_specs, gated_mlp
from ..common import FULL, SLIDING, every, read_layer_types, read_sizes, windows
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope

COHERE2 = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
}


def cohere2(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, COHERE2)
    heads = sizes.heads
    reader.only("head_dim", sizes.hidden // heads.count)
    eps = reader.number("layer_norm_eps", 1e-5)
    scale = reader.number("logit_scale", 0.0625)
    interval = reader.integer("sliding_window_pattern", 4)
    types = read_layer_types(reader, (FULL, SLIDING), sizes.layers, every(interval, FULL, SLIDING))
    window = reader.optional_integer("sliding_window", 4096)
    rope = read_rope(reader, heads.dim, sizes.positions)
    bias = reader.boolean("attention_bias", False)
    _check_the_rest(reader, interval)
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> ParallelBlock:
        name = f"model.layers.{layer}"
        # Without a window in the config, no layer rotates.
        own_rope = rope if types[layer] == SLIDING and window is not None else None
        qkv = load_qkv(weights, f"{name}.self_attn", heads, bias=bias, interleaved=rope.dims)
        output = load_output(weights, f"{name}.self_attn", heads, bias=bias)
        attention = Attention(layer, heads, qkv, output, rope=own_rope)
        norm = LayerNorm.load(weights, f"{name}.input_layernorm", sizes.hidden, eps)
        return ParallelBlock(attention, gated_mlp(weights, name, sizes, gate), norm, rope="rope" if own_rope else None)

    return Architecture(
        sizes,
        attention_specs(sizes, windows(types, window)),
        {"rope": rope},
        block,
        logit_scale=scale,
        final_norm=lambda weights: LayerNorm.load(weights, "model.norm", sizes.hidden, eps),
    )


def _check_the_rest(reader: ConfigReader, interval: int) -> None:
    """Check keys of published configs that are not implemented: accept only the value that matches the implementation."""
    reader.skip("_sliding_window_pattern")
    reader.only("position_embedding_type", "rope_gptj")
    reader.only("order_of_interleaved_layers", "local_attn_first")
    reader.only("rotary_pct", 1.0)
    reader.only("use_embedding_sharing", True)
    reader.only("use_gated_activation", True)
    reader.only("use_parallel_block", True)
    reader.only("use_parallel_embedding", True, False)
    reader.only("use_qk_norm", False)
    reader.only("layer_switch", interval)
    reader.finish()
