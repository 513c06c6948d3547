"""DeepSeek V2 (arXiv:2405.04434), V3 (arXiv:2412.19437), GLM-4.7-Flash and Mistral Small 4: latent attention, routed and shared experts.

MiniCPM 3 has latent attention only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...nn.activations import gated
from ...nn.attention import Temperature
from ...nn.latent_attention import LatentAttention, LatentSizes
from ...nn.rope import Rope, yarn_scale
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from ..block import Block, FeedForward, gated_mlp, pre_norm
from ..common import FULL, Sizes, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..heads.mtp import Head, HeadPlan, Places, deepseek_names, load_head, plain_norm, without_first
from ..rope_config import read_rope
from ..sparse_layers import SparseLayers
from .ministral3 import TEMPERATURE_KEYS, YARN, read_temperature

DEEPSEEK_V2 = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
GLM4_MOE_LITE = {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
}

MISTRAL4 = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "max_position_embeddings": 1048576,
}
MISTRAL4_YARN = YARN | {"rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
MINICPM3 = {
    "vocab_size": 73448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}


def deepseek_v2(config: dict[str, Any]) -> Architecture:
    """Build DeepSeek V2, whose experts are selected by probabilities."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, DEEPSEEK_V2)
    sparse = SparseLayers(reader, sizes, scores="softmax", ranked=1, normalizes=False, count=64, chosen=1, inner=1407, shared=2, dense=0)
    reader.only("rope_interleave", True)
    return _architecture(reader, sizes, sparse.load, Defaults(latent=512, query_latent=1536), paired=True)


def deepseek_v3(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, DEEPSEEK_V3)
    sparse = SparseLayers(reader, sizes, count=256, inner=2048, dense=3, groups=(8, 4), scale=2.5)
    paired = reader.boolean("rope_interleave", True)
    reader.skip("num_mtp_layers", "ep_size")
    return _architecture(reader, sizes, sparse.load, Defaults(latent=512, query_latent=1536), paired=paired)


def glm4_moe_lite(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GLM4_MOE_LITE)
    kinds = reader.names("mlp_layer_types", ("dense", "sparse"), sizes.layers)
    sparse = SparseLayers(reader, sizes, count=64, chosen=4, inner=1536, scale=1.8, kinds=kinds)
    paired = reader.boolean("rope_interleave", True)
    reader.skip("num_mtp_layers")
    reader.only("partial_rotary_factor", 1.0)
    return _architecture(reader, sizes, sparse.load, Defaults(latent=512, query_latent=768, value=256, plain=192), paired=paired)


def mistral4(config: dict[str, Any]) -> Architecture:
    """Build Mistral 4: experts selected by probabilities, queries scaled with their position."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, MISTRAL4)
    sparse = SparseLayers(reader, sizes, scores="softmax", count=128, chosen=4, inner=2048, dense=0)
    paired = reader.boolean("rope_interleave", True)
    temperature = read_temperature(reader, MISTRAL4_YARN)
    defaults = Defaults(latent=256, query_latent=1024, plain=64, rope=MISTRAL4_YARN)
    return _architecture(reader, sizes, sparse.load, defaults, paired=paired, temperature=temperature)


def minicpm3(config: dict[str, Any]) -> Architecture:
    """Build MiniCPM 3: dense, with constant factors on embedding, residual and logits."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, MINICPM3)
    gate = gated(sizes.activation)
    base = reader.optional_integer("dim_model_base", 256) or sizes.hidden
    depth = reader.optional_number("scale_depth", 1.4)
    found = _architecture(
        reader,
        sizes,
        lambda weights, layer: gated_mlp(weights, f"model.layers.{layer}", sizes, gate),
        Defaults(latent=256, query_latent=768, plain=64, turned=32, value=sizes.hidden // sizes.heads.count),
        paired=False,
        residual=1.0 if depth is None else depth * sizes.layers**-0.5,
    )
    return replace(found, embedding_scale=reader.number("scale_emb", 12.0), logit_scale=base / sizes.hidden)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default sizes of a family's heads."""

    latent: int
    """Channels of the latent vector."""
    query_latent: int
    """Channels between the two projections of queries."""
    value: int = 128
    """Channels of a value head."""
    plain: int = 128
    """Channels of a query head that do not rotate."""
    turned: int = 64
    """Channels of a query head that rotate."""
    rope: Mapping[str, Any] | None = None


def _architecture(
    reader: ConfigReader,
    sizes: Sizes,
    mlp: Callable[[Weights, int], FeedForward],
    defaults: Defaults,
    *,
    paired: bool,
    temperature: Temperature | None = None,
    residual: float = 1.0,
) -> Architecture:
    reader.uniform_layers(FULL)
    heads = LatentSizes(
        sizes.hidden,
        sizes.heads.count,
        plain=reader.integer("qk_nope_head_dim", defaults.plain),
        turned=reader.integer("qk_rope_head_dim", defaults.turned, low=2),
        value=reader.optional_integer("v_head_dim", defaults.value) or defaults.value,
        latent=reader.integer("kv_lora_rank", defaults.latent),
        query_latent=reader.optional_integer("q_lora_rank", defaults.query_latent),
    )
    reader.only("qk_head_dim", heads.plain + heads.turned)
    rope = _read_rope(reader, sizes, heads, defaults)
    scale = (heads.plain + heads.turned) ** -0.5 * _rope_scale(reader, defaults)
    bias = reader.boolean("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.skip("scale_emb", "num_nextn_predict_layers")
    reader.finish()

    def mixer(weights: Weights, layer: int, place: int) -> LatentAttention:
        name = f"model.layers.{layer}.self_attn"
        # transformers ignores rms_norm_eps in the norms of latent vectors.
        return LatentAttention.load(
            weights, name, place, heads, rope, eps=1e-6, bias=bias, scale=scale, paired=paired, temperature=temperature
        )

    def block(weights: Weights, layer: int) -> Block:
        attention = mixer(weights, layer, layer)
        return pre_norm(weights, f"model.layers.{layer}", sizes, attention, mlp(weights, layer), residual=residual)

    def head(weights: Weights, places: Places) -> Head:
        attention = mixer(weights, sizes.layers, places.own_attention)
        whole = pre_norm(weights, f"model.layers.{sizes.layers}", sizes, attention, mlp(weights, sizes.layers), residual=residual)
        return load_head(weights, names, places, sizes.hidden, norm, [whole], attention, normed=False)

    names, norm = deepseek_names(sizes.layers), plain_norm(sizes.eps)
    plan = HeadPlan(without_first(heads.spec), head, witness=names.join)
    return Architecture(sizes, (heads.spec,) * sizes.layers, {"rope": rope}, block, mtp=plan)


def _read_rope(reader: ConfigReader, sizes: Sizes, heads: LatentSizes, defaults: Defaults) -> Rope:
    """Check Mistral's fraction of the head that rotates."""
    if defaults.rope is None:
        return read_rope(reader, heads.turned, sizes.positions)
    dim = heads.plain + heads.turned
    return read_rope(reader, dim, sizes.positions, partial=heads.turned / dim, otherwise=defaults.rope, ignored=TEMPERATURE_KEYS)


def _rope_scale(reader: ConfigReader, defaults: Defaults) -> float:
    """Return the factor of YaRN on the scale of the scores."""
    scaling = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or defaults.rope or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    share = scaling.get("mscale_all_dim")
    return float(yarn_scale(scaling.get("factor", 1.0), share) ** 2) if kind != "default" and share else 1.0
