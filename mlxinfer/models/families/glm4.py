"""GLM-4 (0414): norms before and after, half of each head rotates in adjacent pairs. GLM-4.5 (arXiv:2508.06471): experts."""

from __future__ import annotations

from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.linear import JoinedLinear, Linear
from ...nn.mlp import GatedMLP
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ..block import Block, Norms, attention_specs, pre_norm
from ..common import FULL, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope
from ..sparse_layers import SparseLayers

GLM4 = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
}
GLM4_MOE = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def glm4(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GLM4)
    heads = sizes.heads
    reader.uniform_layers(FULL)
    rope = read_rope(reader, heads.dim, sizes.positions, partial=0.5)
    bias = reader.boolean("attention_bias", True)
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = load_qkv(weights, f"{name}.self_attn", heads, bias=bias, interleaved=rope.dims)
        attention = Attention(layer, heads, qkv, load_output(weights, f"{name}.self_attn", heads), rope=rope)
        gate_up = Linear.load(weights, f"{name}.mlp.gate_up_proj", 2 * sizes.inner, sizes.hidden)
        down = Linear.load(weights, f"{name}.mlp.down_proj", sizes.hidden, sizes.inner)
        mlp = GatedMLP(JoinedLinear.fused(gate_up, [sizes.inner, sizes.inner]), down, gate)
        names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
        return Block(attention, mlp, Norms(*(RMSNorm.load(weights, f"{name}.{part}", sizes.hidden, sizes.eps) for part in names)))

    return Architecture(sizes, attention_specs(sizes, [None] * sizes.layers), {"rope": rope}, block)


def glm4_moe(config: dict[str, Any]) -> Architecture:
    """Build GLM-4.5: first dense layers, then routed experts with a selection bias and a shared expert."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GLM4_MOE)
    heads = sizes.heads
    reader.uniform_layers(FULL)
    rope = read_rope(reader, heads.dim, sizes.positions, partial=0.5)
    bias, head_norms = reader.boolean("attention_bias", False), reader.boolean("use_qk_norm", False)
    sparse = SparseLayers(reader, sizes)
    reader.skip("num_nextn_predict_layers")
    reader.finish()

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = load_qkv(weights, f"{name}.self_attn", heads, bias=bias)
        norms = [RMSNorm.load(weights, f"{name}.self_attn.{part}", heads.dim, sizes.eps) for part in ("q_norm", "k_norm") if head_norms]
        q_norm, k_norm = norms or (None, None)
        output = load_output(weights, f"{name}.self_attn", heads)
        attention = Attention(layer, heads, qkv, output, rope=rope, q_norm=q_norm, k_norm=k_norm)
        return pre_norm(weights, name, sizes, attention, sparse.load(weights, layer))

    return Architecture(sizes, attention_specs(sizes, [None] * sizes.layers), {"rope": rope}, block)
