"""Phi-3 (arXiv:2404.14219): Llama with fused projections, and LongRoPE (arXiv:2402.13753) for long contexts."""

from __future__ import annotations

from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output
from ...nn.linear import JoinedLinear, Linear
from ...nn.mlp import GatedMLP
from ...nn.weights import Weights
from ..block import Block, attention_specs, pre_norm
from ..common import FULL, SLIDING, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope

PHI3 = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def phi3(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, PHI3)
    heads = sizes.heads
    window = reader.optional_integer("sliding_window")
    reader.uniform_layers(FULL if window is None else SLIDING)
    reader.only("full_attn_mod", 1)
    reader.only("interpolate_factor", 1)
    rope = read_rope(
        reader,
        heads.dim,
        sizes.positions,
        partial=1.0,
        trained=4096,
        aliases={"su": "longrope", "yarn": "longrope"},
    )
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = Linear.load(weights, f"{name}.self_attn.qkv_proj", sum(heads.sizes), sizes.hidden)
        output = load_output(weights, f"{name}.self_attn", heads)
        attention = Attention(layer, heads, JoinedLinear.fused(qkv, heads.sizes), output, rope=rope)
        gate_up = Linear.load(weights, f"{name}.mlp.gate_up_proj", 2 * sizes.inner, sizes.hidden)
        down = Linear.load(weights, f"{name}.mlp.down_proj", sizes.hidden, sizes.inner)
        mlp = GatedMLP(JoinedLinear.fused(gate_up, [sizes.inner, sizes.inner]), down, gate)
        return pre_norm(weights, name, sizes, attention, mlp)

    return Architecture(sizes, attention_specs(sizes, [window] * sizes.layers), {"rope": rope}, block)
