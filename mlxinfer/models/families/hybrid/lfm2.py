"""LFM2 (arXiv:2511.23404): mostly short convolutions, with attention every few layers; also with experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....cache.base import AttentionSpec, LayerSpec
from ....nn.activations import Gate, gated
from ....nn.attention import Attention, load_qkv
from ....nn.linear import JoinedLinear, Linear
from ....nn.mlp import GatedMLP
from ....nn.moe import MixtureOfExperts
from ....nn.norms import RMSNorm
from ....nn.rope import Rope
from ....nn.routes import biased_route
from ....nn.short_conv import ShortConv
from ....nn.weights import Recipe, Weights, load_convolution
from ...block import Block, FeedForward, Mixer, Norms
from ...common import FULL, Sizes, read_layer_types, read_sizes
from ...config_reader import ConfigReader
from ...decoder import Architecture
from ...experts import load_bias, load_experts, read_chosen_count, read_expert_count
from ...rope_config import read_rope

LFM2 = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
}
LFM2_MOE = LFM2 | {"hidden_size": 2048, "intermediate_size": 7168}
CONV = "conv"
STORED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

LoadMLP = Callable[[Weights, int], FeedForward]


def lfm2(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, LFM2)
    inner = _inner(reader, reader.integer("block_ff_dim", sizes.inner))
    gate = gated("silu")

    def mlp(weights: Weights, layer: int) -> FeedForward:
        name = f"model.layers.{layer}.feed_forward"
        parts = [Linear.load(weights, f"{name}.{part}", inner, sizes.hidden) for part in ("w1", "w3")]
        return GatedMLP(JoinedLinear(parts, [inner, inner]), Linear.load(weights, f"{name}.w2", sizes.hidden, inner), gate)

    return _architecture(reader, sizes, mlp)


def lfm2_moe(config: dict[str, Any]) -> Architecture:
    """Build LFM2 with experts, selected by sigmoid and bias, after the first dense layers."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, LFM2_MOE)
    gate = gated("silu")
    count = read_expert_count(reader, 32)
    chosen = read_chosen_count(reader, 4, count)
    shape = (count, reader.integer("moe_intermediate_size", 1792), sizes.hidden)
    dense = reader.integer("num_dense_layers", 2, low=0)
    biased, normalized = reader.boolean("use_expert_bias", True), reader.boolean("norm_topk_prob", True)
    scale = reader.number("routed_scaling_factor", 1.0)

    def mlp(weights: Weights, layer: int) -> FeedForward:
        name = f"model.layers.{layer}.feed_forward"
        if layer < dense:
            return _dense(weights, name, sizes, gate)
        router = Linear.load(weights, f"{name}.gate", count, sizes.hidden, quantizable=False)
        bias = load_bias(weights, f"{name}.expert_bias", count) if biased else None
        route = biased_route(chosen, bias, normalized=normalized, added=1e-6, scale=scale)
        return MixtureOfExperts(router, route, load_experts(weights, f"{name}.switch_mlp", f"{name}.experts", shape, gate, STORED))

    return _architecture(reader, sizes, mlp)


def _dense(weights: Weights, name: str, sizes: Sizes, gate: Gate) -> GatedMLP:
    def load(part: str, rows: int, columns: int) -> Linear:
        stored = Recipe((f"{name}.{STORED[part]}.weight",), ((rows, columns),), lambda sources: sources[0])
        return Linear.load(weights, f"{name}.{part}", rows, columns, otherwise=[stored])

    parts = [load(part, sizes.inner, sizes.hidden) for part in ("gate_proj", "up_proj")]
    return GatedMLP(JoinedLinear(parts, [sizes.inner, sizes.inner]), load("down_proj", sizes.hidden, sizes.inner), gate)


def _inner(reader: ConfigReader, inner: int) -> int:
    """Return the channels of the feed-forward layer, which the config may state before an adjustment."""
    multiple = reader.integer("block_multiple_of", 256)
    factor = reader.optional_number("block_ffn_dim_multiplier", 1.0)
    if not reader.boolean("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    return inner if factor is None else multiple * ((int(factor * inner) + multiple - 1) // multiple)


def _architecture(reader: ConfigReader, sizes: Sizes, mlp: LoadMLP) -> Architecture:
    heads, hidden = sizes.heads, sizes.hidden
    taps = reader.integer("conv_L_cache", 3, low=2)
    bias = reader.boolean("conv_bias", False)
    eps = reader.number("norm_eps", 1e-5)
    attends = reader.integers("full_attn_idxs")
    types = read_layer_types(reader, (FULL, CONV), sizes.layers, lambda layer: FULL if attends is None or layer in attends else CONV)
    theta = reader.optional_number("theta") or 1000000.0
    rope = read_rope(reader, heads.dim, sizes.positions, theta=theta)
    _check_the_rest(reader, sizes)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        mixer: Mixer
        if types[layer] == CONV:
            mixer = _load_conv(weights, f"{name}.conv", layer, hidden, taps, bias)
        else:
            mixer = _load_attention(weights, f"{name}.self_attn", layer, sizes, rope, eps)
        norms = Norms(
            before_mixer=RMSNorm.load(weights, f"{name}.operator_norm", hidden, eps),
            before_mlp=RMSNorm.load(weights, f"{name}.ffn_norm", hidden, eps),
        )
        return Block(mixer, mlp(weights, layer), norms)

    full = AttentionSpec(heads.kv, heads.dim, heads.dim, query_heads=heads.count)
    specs: tuple[LayerSpec, ...] = tuple(ShortConv.spec(hidden, taps) if kind == CONV else full for kind in types)
    return Architecture(
        sizes, specs, {"rope": rope}, block, final_norm=lambda weights: RMSNorm.load(weights, "model.embedding_norm", hidden, eps)
    )


def _check_the_rest(reader: ConfigReader, sizes: Sizes) -> None:
    """Check keys of published configs that are not implemented: accept only the value that matches the implementation."""
    for key in ("block_dim", "conv_dim", "conv_dim_out", "block_out_dim"):
        reader.only(key, sizes.hidden)
    reader.only("num_heads", sizes.heads.count)
    reader.only("block_use_swiglu", True)
    reader.only("block_use_xavier_init", True, False)
    reader.only("block_mlp_init_scale", 1.0)
    reader.only("block_norm_eps", 1e-5)
    reader.only("conv_use_xavier_init", True, False)
    reader.only("use_pos_enc", True)
    reader.only("use_qk_norm", True)
    reader.skip("tie_embedding")
    reader.finish()


def _load_attention(weights: Weights, name: str, layer: int, sizes: Sizes, rope: Rope, eps: float) -> Attention:
    heads = sizes.heads
    output = Linear.load(weights, f"{name}.out_proj", sizes.hidden, heads.count * heads.dim)
    norms = [RMSNorm.load(weights, f"{name}.{part}_layernorm", heads.dim, eps) for part in ("q", "k")]
    return Attention(layer, heads, load_qkv(weights, name, heads), output, rope=rope, q_norm=norms[0], k_norm=norms[1])


def _load_conv(weights: Weights, name: str, layer: int, hidden: int, taps: int, bias: bool) -> ShortConv:
    return ShortConv(
        layer,
        Linear.load(weights, f"{name}.in_proj", 3 * hidden, hidden, bias=bias),
        Linear.load(weights, f"{name}.out_proj", hidden, hidden, bias=bias),
        convolution=load_convolution(weights, f"{name}.conv", hidden, taps),
        bias=weights.vector(f"{name}.conv.bias", (hidden,)) if bias else None,
    )
