"""Kimi Linear (arXiv:2510.26692): delta attention with per-channel decay, latent attention without positions every few layers, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ....cache.base import LayerSpec
from ....nn.gated_delta import DeltaSizes, GatedDelta, NarrowInputs, gated_by_sigmoid
from ....nn.latent_attention import LatentAttention, LatentSizes
from ....nn.linear import JoinedLinear, Linear
from ....nn.weights import Matrix, Recipe, Weights, load_convolution
from ....util.dataclass import dataclass
from ...block import Block, Mixer, pre_norm
from ...common import FULL, LINEAR, Sizes, read_sizes
from ...config_reader import ConfigReader
from ...decoder import Architecture
from ...sparse_layers import SparseLayers

KIMI_LINEAR = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
}
PUBLISHED_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}
"""Keys of the published config and of transformers 5 to DeepSeek's keys."""
_LATENT_EPS = 1e-6
"""Epsilon of the norm of latent vectors, which is independent of `rms_norm_eps`."""
EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def kimi_linear(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(_translated(config))
    sizes = read_sizes(reader, KIMI_LINEAR)
    kinds = reader.names("mlp_layer_types", ("dense", "sparse"), sizes.layers)
    sparse = SparseLayers(reader, sizes, count=256, inner=1024, scale=2.446, kinds=kinds, parts=EXPERTS)
    types = reader.names("layer_types", (FULL, LINEAR), sizes.layers)
    types = types or [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(sizes.layers)]
    heads, delta = _read_latent(reader, sizes), _read_delta(reader, sizes)
    scale = (heads.plain + heads.turned) ** -0.5
    bias = reader.boolean("attention_bias", False)
    _check_the_rest(reader)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}.self_attn"
        mixer: Mixer
        if types[layer] == LINEAR:
            mixer = _load_delta(weights, name, layer, sizes, delta)
        else:
            mixer = LatentAttention.load(weights, name, layer, heads, None, eps=_LATENT_EPS, bias=bias, scale=scale, paired=False)
        return pre_norm(weights, f"model.layers.{layer}", sizes, mixer, sparse.load(_ExpertNames(weights), layer), rope=None)

    specs: tuple[LayerSpec, ...] = tuple(delta.spec if kind == LINEAR else heads.spec for kind in types)
    return Architecture(sizes, specs, {}, block)


def _translated(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with DeepSeek's keys and a flattened `linear_attn_config`, which counts layers from 1."""
    known = {PUBLISHED_KEYS.get(key, key): value for key, value in config.items() if value is not None and key != "linear_attn_config"}
    linear = config.get("linear_attn_config")
    if not isinstance(linear, dict):
        return known
    full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
    if isinstance(full, list) and isinstance(kda, list):
        order = {place: kind for places, kind in ((full, FULL), (kda, LINEAR)) for place in places}
        known.setdefault("layer_types", [order.get(layer + 1) for layer in range(len(order))])
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim"}
    rest = {names.get(key, f"linear_attn_config.{key}"): value for key, value in linear.items()}
    return known | {key: value for key, value in rest.items() if not key.endswith(("full_attn_layers", "kda_layers"))}


def _read_latent(reader: ConfigReader, sizes: Sizes) -> LatentSizes:
    return LatentSizes(
        sizes.hidden,
        sizes.heads.count,
        plain=reader.integer("qk_nope_head_dim", 128),
        turned=reader.integer("qk_rope_head_dim", 64),
        value=reader.optional_integer("v_head_dim", 128) or 128,
        latent=reader.integer("kv_lora_rank", 512),
        query_latent=reader.optional_integer("q_lora_rank"),
    )


def _read_delta(reader: ConfigReader, sizes: Sizes) -> DeltaSizes:
    count, dim = reader.integer("linear_num_heads", 32), reader.integer("linear_head_dim", 128)
    return DeltaSizes(sizes.hidden, count, count, dim, dim, reader.integer("linear_conv_kernel_dim", 4, low=2), by_channel=True)


def _check_the_rest(reader: ConfigReader) -> None:
    """Ignore rope keys, because no layer rotates, and check the rest."""
    reader.only("mla_use_nope", True)
    reader.only("use_grouped_topk", True)
    reader.only("num_nextn_predict_layers", 0)
    reader.skip("rope_parameters", "rope_scaling", "rope_theta", "qk_head_dim")
    reader.finish()


def _load_delta(weights: Weights, name: str, layer: int, sizes: Sizes, delta: DeltaSizes) -> GatedDelta:
    hidden, heads, dim = sizes.hidden, delta.value_heads, delta.key_dim
    widths = {"q_proj": delta.keys, "k_proj": delta.keys, "v_proj": delta.values, "b_proj": heads, "f_a_proj": dim, "g_a_proj": dim}
    parts = [Linear.load(weights, f"{name}.{part}", size, hidden) for part, size in widths.items()]
    taps = [load_convolution(weights, f"{name}.{part}_conv.conv", delta.keys, delta.taps, f"{name}.{part}_conv1d") for part in "qkv"]
    rate = weights.vector(f"{name}.A_log", (1, 1, heads, 1), dtype=mx.float32)
    return GatedDelta(
        layer,
        delta,
        NarrowInputs(
            JoinedLinear(parts, list(widths.values())),
            Linear.load(weights, f"{name}.f_b_proj", delta.decays, dim),
            Linear.load(weights, f"{name}.g_b_proj", delta.values, dim),
        ),
        Linear.load(weights, f"{name}.o_proj", hidden, delta.values),
        convolution=mx.concatenate(taps),
        decay=mx.repeat(rate.reshape(-1), dim),
        decay_bias=weights.vector(f"{name}.dt_bias", (delta.decays,), dtype=mx.float32),
        norm=weights.vector(f"{name}.o_norm.weight", (dim,)),
        eps=sizes.eps,
        gate=gated_by_sigmoid,
    )


@dataclass(frozen=True, slots=True)
class _ExpertNames:
    """Weights whose experts may be named `block_sparse_moe` instead of `mlp`, the name of the graph and of mlx-lm."""

    weights: Weights

    def has(self, name: str) -> bool:
        return self.weights.has(name) or self.weights.has(_stored(name))

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        return self.weights.matrix(name, shape, otherwise=_recipes(name, shape, otherwise), quantizable=quantizable)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        return self.weights.vector(name, shape, otherwise=_recipes(name, shape, otherwise), dtype=dtype)


def _stored(name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.")


def _recipes(name: str, shape: tuple[int, ...], recipes: Sequence[Recipe]) -> list[Recipe]:
    itself = Recipe((_stored(name),), (shape,), lambda sources: sources[0])
    return [itself, *recipes, *(replace(recipe, sources=tuple(map(_stored, recipe.sources))) for recipe in recipes)]
