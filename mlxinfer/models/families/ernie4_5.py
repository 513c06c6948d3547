"""ERNIE 4.5: Llama with rotation of adjacent pairs, also with experts selected by probabilities and a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.linear import Linear
from ...nn.mlp import GatedMLP
from ...nn.moe import MixtureOfExperts, SharedExpert
from ...nn.routes import biased_route
from ...nn.weights import Weights
from ..block import Block, FeedForward, attention_specs, gated_mlp, pre_norm
from ..common import FULL, Sizes, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..experts import load_bias, load_experts
from ..rope_config import read_rope

ERNIE = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
ERNIE_MOE = ERNIE | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
}

LoadMLP = Callable[[Weights, int], FeedForward]


def ernie4_5(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, ERNIE)
    bias, gate = reader.boolean("use_bias", False), gated(sizes.activation)
    return _architecture(reader, sizes, lambda weights, layer: gated_mlp(weights, f"model.layers.{layer}", sizes, gate, bias=bias), bias)


def ernie4_5_moe(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, ERNIE_MOE)
    bias, gate = reader.boolean("use_bias", False), gated(sizes.activation)
    count, chosen = reader.count("moe_num_experts", 64), reader.integer("moe_k", 6)
    inner = reader.integer("moe_intermediate_size", 1536)
    shared = reader.integer("moe_num_shared_experts", 2, low=0) * inner
    first, interval = reader.integer("moe_layer_start_index", 1, low=0), reader.integer("moe_layer_interval", 1)
    last = reader.integer("moe_layer_end_index", -1, low=-1)
    last = sizes.layers - 1 if last == -1 else last
    least = reader.number("moe_norm_min", 1e-12)
    reader.only("moe_capacity", *[[size] * 3 for size in (64, 128)])
    reader.only("moe_use_aux_free", True)
    reader.only("moe_gate", "topk", "top2_fused")

    def mlp(weights: Weights, layer: int) -> FeedForward:
        name = f"model.layers.{layer}.mlp"
        if (layer + 1) % interval or not first <= layer <= last:
            return gated_mlp(weights, f"model.layers.{layer}", sizes, gate, bias=bias)
        router = Linear.load(weights, f"{name}.gate", count, sizes.hidden, quantizable=False)
        stored = f"{name}.moe_statics.e_score_correction_bias"
        route = biased_route(chosen, load_bias(weights, f"{name}.e_score_correction_bias", count, stored), "softmax", least=least)
        experts = load_experts(weights, f"{name}.switch_mlp", f"{name}.experts", (count, inner, sizes.hidden), gate)
        if not shared:
            return MixtureOfExperts(router, route, experts)
        every_token = GatedMLP.load(weights, f"{name}.shared_experts", sizes.hidden, shared, gate, bias=bias)
        return MixtureOfExperts(router, route, experts, SharedExpert(every_token))

    return _architecture(reader, sizes, mlp, bias)


def _architecture(reader: ConfigReader, sizes: Sizes, mlp: LoadMLP, bias: bool) -> Architecture:
    heads = sizes.heads
    reader.uniform_layers(FULL)
    rope = read_rope(reader, heads.dim, sizes.positions, theta=500000.0)
    reader.only("compression_ratio", 1.0)
    reader.finish()

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = load_qkv(weights, f"{name}.self_attn", heads, bias=bias, interleaved=rope.dims)
        output = load_output(weights, f"{name}.self_attn", heads, bias=bias)
        return pre_norm(weights, name, sizes, Attention(layer, heads, qkv, output, rope=rope), mlp(weights, layer))

    return Architecture(sizes, attention_specs(sizes, [None] * sizes.layers), {"rope": rope}, block)
