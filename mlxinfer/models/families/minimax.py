"""MiniMax-M2: norms across all heads of queries and keys, half of each head rotates, experts selected by sigmoid and bias."""

from __future__ import annotations

from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.linear import Linear
from ...nn.moe import MixtureOfExperts
from ...nn.norms import RMSNorm
from ...nn.routes import biased_route
from ...nn.weights import Weights
from ..block import Block, attention_specs, pre_norm
from ..common import FULL, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..experts import load_bias, load_experts, read_chosen_count, read_expert_count
from ..rope_config import read_rope
from .mixtral import STORED_ONE_BY_ONE

MINIMAX_M2 = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
}


def minimax_m2(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, MINIMAX_M2)
    heads = sizes.heads
    reader.uniform_layers(FULL)
    turned = reader.optional_integer("rotary_dim")
    rope = read_rope(reader, heads.dim, sizes.positions, theta=5000000.0, partial=turned / heads.dim if turned else 1.0)
    count = read_expert_count(reader, 256)
    chosen = read_chosen_count(reader, 8, count)
    _check_the_rest(reader)
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        attention = Attention(
            layer,
            heads,
            load_qkv(weights, f"{name}.self_attn", heads),
            load_output(weights, f"{name}.self_attn", heads),
            rope=rope,
            q_norm=RMSNorm.load(weights, f"{name}.self_attn.q_norm", heads.count * heads.dim, sizes.eps),
            k_norm=RMSNorm.load(weights, f"{name}.self_attn.k_norm", heads.kv * heads.dim, sizes.eps),
            wide_norms=True,
        )
        moe, shape = f"{name}.block_sparse_moe", (count, sizes.inner, sizes.hidden)
        router = Linear.load(weights, f"{moe}.gate", count, sizes.hidden, quantizable=False)
        route = biased_route(chosen, load_bias(weights, f"{moe}.e_score_correction_bias", count))
        experts = load_experts(weights, f"{moe}.switch_mlp", f"{moe}.experts", shape, gate, STORED_ONE_BY_ONE)
        return pre_norm(weights, name, sizes, attention, MixtureOfExperts(router, route, experts))

    return Architecture(sizes, attention_specs(sizes, [None] * sizes.layers), {"rope": rope}, block)


def _check_the_rest(reader: ConfigReader) -> None:
    """Check keys of published configs that are not implemented: accept only the value that matches the implementation."""
    kinds = reader.take("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise reader.bad("attn_type_list", kinds, "1 for every layer of this model")
    reader.only("qk_norm_type", "per_layer")
    reader.only("scoring_func", "sigmoid")
    reader.only("shared_intermediate_size", 0)
    reader.only("use_qk_norm", True)
    reader.only("use_routing_bias", True)
    reader.skip("mtp_transformer_layers", "num_mtp_modules", "use_mtp", "shared_moe_mode")
    reader.finish()
