"""GLM-4 (0414): norms before and after, and half of each head rotates in neighbouring pairs. GLM-4.5 (arXiv:2508.06471): experts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.linear import JoinedLinear, Linear
from ...nn.mlp import GatedMLP
from ...nn.moe import BiasedRoute, MixtureOfExperts, SharedExpert
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ..block import Block, FeedForward, Norms, attention_specs, gated_mlp, pre_norm
from ..common import FULL, Sizes, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..experts import load_bias, load_experts, read_chosen_count, read_groups
from ..rope_config import read_rope

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
    """The first layers are dense; the others have experts, chosen with a bias, next to one that every token takes."""
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


class SparseLayers:
    """The feed-forward layers of models in the manner of DeepSeek V3 (arXiv:2412.19437): dense at first, then experts from groups, chosen
    by a sigmoid and a bias, next to shared ones."""

    def __init__(self, reader: ConfigReader, sizes: Sizes) -> None:
        self.sizes = sizes
        self.gate = gated(sizes.activation)
        self.count = reader.count("n_routed_experts", 128)
        reader.only("num_local_experts", self.count)
        self.chosen = read_chosen_count(reader, 8, self.count)
        self.inner = reader.integer("moe_intermediate_size", 1408)
        self.shared = reader.integer("n_shared_experts", 1, low=0) * self.inner
        self.groups, self.kept = read_groups(reader, self.count)
        self.dense = reader.integer("first_k_dense_replace", 1, low=0)
        self.normalized = reader.boolean("norm_topk_prob", True)
        self.scale = reader.number("routed_scaling_factor", 1.0)
        reader.only("moe_layer_freq", 1)
        reader.only("scoring_func", "sigmoid")
        reader.only("topk_method", "noaux_tc")

    def load(self, weights: Weights, layer: int) -> FeedForward:
        if layer < self.dense:
            return gated_mlp(weights, f"model.layers.{layer}", self.sizes, self.gate)
        name, hidden = f"model.layers.{layer}.mlp", self.sizes.hidden
        router = Linear.load(weights, f"{name}.gate", self.count, hidden, quantizable=False)
        bias: mx.array = load_bias(weights, f"{name}.gate.e_score_correction_bias", self.count)
        route = BiasedRoute(
            self.chosen, bias, normalized=self.normalized, added=1e-20, scale=self.scale, groups=self.groups, kept=self.kept
        )
        experts = load_experts(weights, f"{name}.switch_mlp", f"{name}.experts", (self.count, self.inner, hidden), self.gate)
        if not self.shared:
            return MixtureOfExperts(router, route, experts)
        shared = GatedMLP.load(weights, f"{name}.shared_experts", hidden, self.shared, self.gate)
        return MixtureOfExperts(router, route, experts, SharedExpert(shared))
