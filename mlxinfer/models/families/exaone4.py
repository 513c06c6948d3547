"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP, and on query and key heads.

In models with windows, layers without a window have no positions.
"""

from __future__ import annotations

from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ..block import Block, Norms, attention_specs, gated_mlp
from ..common import FULL, SLIDING, read_layer_types, read_sizes, windows
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope

EXAONE4 = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def exaone4(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, EXAONE4)
    heads = sizes.heads
    window = reader.optional_integer("sliding_window", 4096)
    pattern = reader.take("sliding_window_pattern", 4)
    types = read_layer_types(reader, (FULL, SLIDING), sizes.layers, lambda layer: _kind(reader, pattern, layer, window, sizes.layers))
    rope = read_rope(reader, heads.dim, sizes.positions)
    reader.only("use_qk_norm", True)
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        own_rope = rope if window is None or types[layer] == SLIDING else None
        attention = Attention(
            layer,
            heads,
            load_qkv(weights, f"{name}.self_attn", heads),
            load_output(weights, f"{name}.self_attn", heads),
            rope=own_rope,
            q_norm=RMSNorm.load(weights, f"{name}.self_attn.q_norm", heads.dim, sizes.eps),
            k_norm=RMSNorm.load(weights, f"{name}.self_attn.k_norm", heads.dim, sizes.eps),
        )
        norms = Norms(
            after_mixer=RMSNorm.load(weights, f"{name}.post_attention_layernorm", sizes.hidden, sizes.eps),
            after_mlp=RMSNorm.load(weights, f"{name}.post_feedforward_layernorm", sizes.hidden, sizes.eps),
        )
        return Block(attention, gated_mlp(weights, name, sizes, gate), norms, rope="rope" if own_rope else None)

    return Architecture(sizes, attention_specs(sizes, windows(types, window)), {"rope": rope}, block)


def _kind(reader: ConfigReader, pattern: Any, layer: int, window: int | None, layers: int) -> str:
    """Return default layer types: each n-th layer is full for a number; "LLLG" repeats, with a full layer at the end."""
    if window is None or not pattern:
        return FULL
    if isinstance(pattern, int):
        return SLIDING if (layer + 1) % pattern else FULL
    if not isinstance(pattern, str) or set(pattern) - {"L", "G"}:
        raise reader.bad("sliding_window_pattern", pattern, "a whole number or a sequence of L and G")
    return SLIDING if pattern[layer % len(pattern)] == "L" and layer < layers - 1 else FULL
