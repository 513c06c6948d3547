"""Mixtral (arXiv:2401.04088): Mistral with experts in place of the MLP."""

from __future__ import annotations

from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.linear import Linear
from ...nn.moe import MixtureOfExperts
from ...nn.routes import softmax_then_top
from ...nn.weights import Recipe, Weights
from ..block import Block, attention_specs, pre_norm
from ..common import FULL, SLIDING, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..experts import load_experts, read_chosen_count, read_expert_count
from ..rope_config import read_rope

MIXTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
STORED_ONE_BY_ONE = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, MIXTRAL)
    window = reader.optional_integer("sliding_window")
    reader.uniform_layers(FULL if window is None else SLIDING)
    rope = read_rope(reader, sizes.heads.dim, sizes.positions, theta=1000000.0)
    count = read_expert_count(reader, 8)
    route = softmax_then_top(read_chosen_count(reader, 2, count), normalized=True)
    reader.finish()
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = load_qkv(weights, f"{name}.self_attn", sizes.heads)
        attention = Attention(layer, sizes.heads, qkv, load_output(weights, f"{name}.self_attn", sizes.heads), rope=rope)
        moe, shape = f"{name}.block_sparse_moe", (count, sizes.inner, sizes.hidden)
        renamed = Recipe((f"{name}.mlp.gate.weight",), ((count, sizes.hidden),), lambda sources: sources[0])
        router = Linear.load(weights, f"{moe}.gate", count, sizes.hidden, quantizable=False, otherwise=[renamed])
        source = f"{name}.mlp.experts" if weights.has(f"{name}.mlp.experts.gate_up_proj") else f"{moe}.experts"
        experts = load_experts(weights, f"{moe}.switch_mlp", source, shape, gate, STORED_ONE_BY_ONE)
        return pre_norm(weights, name, sizes, attention, MixtureOfExperts(router, route, experts))

    return Architecture(sizes, attention_specs(sizes, [window] * sizes.layers), {"rope": rope}, block)
