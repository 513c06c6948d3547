"""gpt-oss (arXiv:2508.10925): attention sinks, windows on alternate layers, and experts with a clamped gate."""

from __future__ import annotations

from typing import Any

from ...nn.activations import clamped_swiglu
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.linear import Linear
from ...nn.moe import MixtureOfExperts
from ...nn.routes import top_then_softmax
from ...nn.weights import Weights
from ..block import Block, attention_specs, pre_norm
from ..common import FULL, SLIDING, every, read_layer_types, read_sizes, windows
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..experts import load_interleaved_experts, read_chosen_count, read_expert_count
from ..rope_config import read_rope

GPT_OSS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GPT_OSS)
    window = reader.optional_integer("sliding_window", 128)
    types = read_layer_types(reader, (FULL, SLIDING), sizes.layers, every(2, FULL, SLIDING))
    rope = read_rope(reader, sizes.heads.dim, sizes.positions, theta=150000.0, otherwise=YARN)
    bias = reader.boolean("attention_bias", True)
    count = read_expert_count(reader, 128)
    chosen = read_chosen_count(reader, 4, count)
    reader.only("experts_per_token", chosen)
    reader.skip("initial_context_length")
    gate = clamped_swiglu(reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0))
    reader.finish()

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        attention = Attention(
            layer,
            sizes.heads,
            load_qkv(weights, f"{name}.self_attn", sizes.heads, bias=bias),
            load_output(weights, f"{name}.self_attn", sizes.heads, bias=bias),
            rope=rope,
            sinks=weights.vector(f"{name}.self_attn.sinks", (sizes.heads.count,)),
        )
        router = Linear.load(weights, f"{name}.mlp.router", count, sizes.hidden, bias=True, quantizable=False)
        experts = load_interleaved_experts(weights, f"{name}.mlp.experts", (count, sizes.inner, sizes.hidden), gate)
        return pre_norm(weights, name, sizes, attention, MixtureOfExperts(router, top_then_softmax(chosen), experts))

    return Architecture(sizes, attention_specs(sizes, windows(types, window)), {"rope": rope}, block)
