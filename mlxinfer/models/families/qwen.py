"""Qwen2 (arXiv:2407.10671) and Qwen3 (arXiv:2505.09388), the latter also with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.linear import Linear
from ...nn.moe import MixtureOfExperts
from ...nn.norms import RMSNorm
from ...nn.routes import softmax_then_top
from ...nn.weights import Weights
from ..block import Block, FeedForward, attention_specs, gated_mlp, is_sparse_layer, pre_norm
from ..common import FULL, SLIDING, Sizes, read_layer_types, read_sizes, windows
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..experts import load_experts, read_chosen_count, read_expert_count
from ..rope_config import MRopeLayout, read_rope

QWEN2 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
QWEN3 = QWEN2 | {"head_dim": 128}
QWEN3_MOE = QWEN2 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4}

LoadMLP = Callable[[Weights, int], FeedForward]


def qwen2(config: dict[str, Any]) -> Architecture:
    """Build Qwen2: biases on queries, keys and values only."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, QWEN2)
    reader.only("qkv_bias", True)
    return _dense(reader, sizes, qkv_bias=True, output_bias=False, head_norms=False)


def qwen3(config: dict[str, Any]) -> Architecture:
    """Build Qwen3: a norm per head on queries and keys."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, QWEN3)
    bias = reader.boolean("attention_bias", False)
    return _dense(reader, sizes, qkv_bias=bias, output_bias=bias, head_norms=True)


def qwen3_moe(config: dict[str, Any]) -> Architecture:
    """Build Qwen3 with experts instead of most MLPs."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, QWEN3_MOE)
    bias = reader.boolean("attention_bias", False)
    window = _window(reader)
    reader.skip("max_window_layers")
    reader.uniform_layers(FULL if window is None else SLIDING)
    inner = reader.integer("moe_intermediate_size", 768)
    count = read_expert_count(reader, 128)
    route = softmax_then_top(read_chosen_count(reader, 8, count), normalized=reader.boolean("norm_topk_prob", False))
    sparse = is_sparse_layer(reader, count)
    gate = gated(sizes.activation)

    def mlp(weights: Weights, layer: int) -> FeedForward:
        name = f"model.layers.{layer}"
        if not sparse(layer):
            return gated_mlp(weights, name, sizes, gate)
        router = Linear.load(weights, f"{name}.mlp.gate", count, sizes.hidden, quantizable=False)
        shape = (count, inner, sizes.hidden)
        experts = load_experts(weights, f"{name}.mlp.switch_mlp", f"{name}.mlp.experts", shape, gate)
        return MixtureOfExperts(router, route, experts)

    return _architecture(reader, sizes, [window] * sizes.layers, mlp, qkv_bias=bias, output_bias=bias, head_norms=True)


def _window(reader: ConfigReader) -> int | None:
    window = reader.optional_integer("sliding_window", 4096)
    return window if reader.boolean("use_sliding_window", False) else None


def _dense(reader: ConfigReader, sizes: Sizes, *, qkv_bias: bool, output_bias: bool, head_norms: bool) -> Architecture:
    window = _window(reader)
    first = reader.integer("max_window_layers", 28, low=0)
    types = read_layer_types(
        reader, (FULL, SLIDING), sizes.layers, lambda layer: SLIDING if window is not None and layer >= first else FULL
    )
    gate = gated(sizes.activation)

    def mlp(weights: Weights, layer: int) -> FeedForward:
        return gated_mlp(weights, f"model.layers.{layer}", sizes, gate)

    return _architecture(reader, sizes, windows(types, window), mlp, qkv_bias=qkv_bias, output_bias=output_bias, head_norms=head_norms)


def _architecture(
    reader: ConfigReader, sizes: Sizes, seen: list[int | None], mlp: LoadMLP, *, qkv_bias: bool, output_bias: bool, head_norms: bool
) -> Architecture:
    if head_norms:
        reader.only("use_qk_norm", True)
    sizes, notes = _without_chunks(reader, sizes)
    # Of the models that see images, Qwen2-VL and Qwen2.5-VL have Qwen2's graph, and Qwen3-VL has Qwen3's.
    rope = read_rope(reader, sizes.heads.dim, sizes.positions, mrope=MRopeLayout(interleaved=head_norms))
    reader.finish()

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        qkv = load_qkv(weights, f"{name}.self_attn", sizes.heads, bias=qkv_bias)
        output = load_output(weights, f"{name}.self_attn", sizes.heads, bias=output_bias)
        norms = [
            RMSNorm.load(weights, f"{name}.self_attn.{part}", sizes.heads.dim, sizes.eps) for part in ("q_norm", "k_norm") if head_norms
        ]
        q_norm, k_norm = norms or (None, None)
        attention = Attention(layer, sizes.heads, qkv, output, rope=rope, q_norm=q_norm, k_norm=k_norm)
        return pre_norm(weights, name, sizes, attention, mlp(weights, layer))

    return Architecture(sizes, attention_specs(sizes, seen), {"rope": rope}, block, notes=notes)


def _without_chunks(reader: ConfigReader, sizes: Sizes) -> tuple[Sizes, tuple[str, ...]]:
    """Return the sizes limited to the context in which dual chunk attention (Qwen2.5-1M) is plain attention, and a note about it."""
    chunks = reader.take("dual_chunk_attention_config")
    if chunks is None:
        return sizes, ()
    if not isinstance(chunks, dict):
        raise reader.bad("dual_chunk_attention_config", chunks, "an object")
    own = ConfigReader(chunks)
    chunk = own.integer("chunk_size", 262144) - own.integer("local_size", 8192, low=0)
    length = max(1, min(sizes.positions, chunk, own.integer("original_max_position_embeddings", sizes.positions)))
    note = f"without dual chunk attention, which this model needs for longer texts, the context is {length} tokens"
    return replace(sizes, positions=length), (note,)
