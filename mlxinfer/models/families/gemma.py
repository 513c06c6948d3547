"""Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786): norms before and after, windows on most layers, scaled embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...cache.base import AttentionSpec
from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.norms import RMSNorm
from ...nn.rope import Rope
from ...nn.weights import Weights
from ..block import Block, Norms, attention_specs, bidirectional_specs, gated_mlp
from ..common import FULL, SLIDING, Sizes, every, read_layer_types, read_sizes, windows
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope, read_rope_by_layer

GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA3 = GEMMA2 | {"vocab_size": 262208, "max_position_embeddings": 131072}


def gemma2(config: dict[str, Any]) -> Architecture:
    """Build Gemma 2: caps on attention scores and logits, a window in every other layer."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GEMMA2, activation_key="hidden_activation")
    types = read_layer_types(reader, (FULL, SLIDING), sizes.layers, every(2, FULL, SLIDING))
    rope = read_rope(reader, sizes.heads.dim, sizes.positions)
    cap = reader.optional_number("attn_logit_softcapping", 50.0)
    return _architecture(reader, sizes, types, {FULL: rope, SLIDING: rope}, attention_cap=cap, logit_cap=30.0, head_norms=False)


def gemma3_text(config: dict[str, Any]) -> Architecture:
    """Build Gemma 3: norms on queries and keys, a separate rope for layers with a window."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GEMMA3, activation_key="hidden_activation")
    interval = reader.integer("sliding_window_pattern", 6)
    types = read_layer_types(reader, (FULL, SLIDING), sizes.layers, every(interval, FULL, SLIDING))
    theta = {FULL: ("rope_theta", 1000000.0), SLIDING: ("rope_local_base_freq", 10000.0)}
    ropes = read_rope_by_layer(reader, sizes.heads.dim, sizes.positions, theta=theta, scaled=FULL)
    reader.skip("_sliding_window_pattern")
    both_ways = reader.boolean("use_bidirectional_attention", False)
    capped = reader.optional_number("attn_logit_softcapping") is not None
    notes = ("attn_logit_softcapping is ignored: Gemma 3 does not cap attention scores",) if capped else ()
    read = _architecture(reader, sizes, types, ropes, attention_cap=None, logit_cap=None, head_norms=True, both_ways=both_ways, notes=notes)
    return replace(read, specs=tuple(replace(s, sees_spans=True) if isinstance(s, AttentionSpec) else s for s in read.specs))


def _architecture(
    reader: ConfigReader,
    sizes: Sizes,
    types: list[str],
    ropes: Mapping[str, Rope],
    *,
    attention_cap: float | None,
    logit_cap: float | None,
    head_norms: bool,
    both_ways: bool = False,
    notes: tuple[str, ...] = (),
) -> Architecture:
    window = reader.optional_integer("sliding_window", 4096)
    reader.only("sliding_window_size", window)
    if both_ways and window is not None:
        window = window // 2 + 1  # the config counts both sides; in transformers 5.23 a token attends to distances below this
    scale = reader.nonzero("query_pre_attn_scalar", 256) ** -0.5
    logit_cap = reader.optional_number("final_logit_softcapping", logit_cap)
    bias = reader.boolean("attention_bias", False)
    if head_norms:
        reader.only("use_qk_norm", True)
    reader.skip("hidden_act")
    reader.finish()
    gate = gated(sizes.activation)

    def norm(weights: Weights, name: str, size: int = sizes.hidden) -> RMSNorm:
        return RMSNorm.load(weights, name, size, sizes.eps, centred=True)

    def block(weights: Weights, layer: int) -> Block:
        name, dim = f"model.layers.{layer}", sizes.heads.dim
        attention = Attention(
            layer,
            sizes.heads,
            load_qkv(weights, f"{name}.self_attn", sizes.heads, bias=bias),
            load_output(weights, f"{name}.self_attn", sizes.heads, bias=bias),
            rope=ropes[types[layer]],
            scale=scale,
            softcap=attention_cap,
            q_norm=norm(weights, f"{name}.self_attn.q_norm", dim) if head_norms else None,
            k_norm=norm(weights, f"{name}.self_attn.k_norm", dim) if head_norms else None,
        )
        norms = Norms(
            before_mixer=norm(weights, f"{name}.input_layernorm"),
            after_mixer=norm(weights, f"{name}.post_attention_layernorm"),
            before_mlp=norm(weights, f"{name}.pre_feedforward_layernorm"),
            after_mlp=norm(weights, f"{name}.post_feedforward_layernorm"),
        )
        return Block(attention, gated_mlp(weights, name, sizes, gate), norms, rope=types[layer])

    return Architecture(
        sizes,
        (bidirectional_specs if both_ways else attention_specs)(sizes, windows(types, window)),
        ropes,
        block,
        embedding_scale=sizes.hidden**0.5,
        logit_cap=logit_cap,
        final_norm=lambda weights: norm(weights, "model.norm"),
        notes=notes,
    )
