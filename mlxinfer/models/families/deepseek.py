"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437), and GLM-4.7-Flash, which is built alike: latent attention, and experts next
to shared ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...nn.latent_attention import LatentAttention, LatentSizes
from ...nn.rope import yarn_scale
from ...nn.weights import Weights
from ..block import Block, pre_norm
from ..common import FULL, Sizes, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..rope_config import read_rope
from ..sparse_layers import SparseLayers

DEEPSEEK_V2 = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
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


def deepseek_v2(config: dict[str, Any]) -> Architecture:
    """Experts are chosen by their probabilities."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, DEEPSEEK_V2)
    sparse = SparseLayers(reader, sizes, scores="softmax", count=64, chosen=None, inner=1407, shared=2, dense=0)
    reader.only("rope_interleave", True)
    return _architecture(reader, sizes, sparse, latent=512, query_latent=1536, value=128, plain=128, paired=True)


def deepseek_v3(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, DEEPSEEK_V3)
    sparse = SparseLayers(reader, sizes, count=256, inner=2048, dense=3, groups=(8, 4), scale=2.5)
    paired = reader.boolean("rope_interleave", True)
    reader.skip("num_nextn_predict_layers", "num_mtp_layers", "ep_size")
    return _architecture(reader, sizes, sparse, latent=512, query_latent=1536, value=128, plain=128, paired=paired)


def glm4_moe_lite(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GLM4_MOE_LITE)
    kinds = reader.names("mlp_layer_types", ("dense", "sparse"), sizes.layers)
    sparse = SparseLayers(reader, sizes, count=64, chosen=4, inner=1536, scale=1.8, kinds=kinds)
    paired = reader.boolean("rope_interleave", True)
    reader.skip("num_nextn_predict_layers", "num_mtp_layers")
    reader.only("partial_rotary_factor", 1.0)
    return _architecture(reader, sizes, sparse, latent=512, query_latent=768, value=256, plain=192, paired=paired)


def _architecture(
    reader: ConfigReader, sizes: Sizes, sparse: SparseLayers, *, latent: int, query_latent: int, value: int, plain: int, paired: bool
) -> Architecture:
    reader.uniform_layers(FULL)
    heads = LatentSizes(
        sizes.hidden,
        sizes.heads.count,
        plain=reader.integer("qk_nope_head_dim", plain),
        turned=reader.integer("qk_rope_head_dim", 64, low=2),
        value=reader.integer("v_head_dim", value),
        latent=reader.integer("kv_lora_rank", latent),
        query_latent=reader.optional_integer("q_lora_rank", query_latent),
    )
    reader.only("qk_head_dim", heads.plain + heads.turned)
    rope = read_rope(reader, heads.turned, sizes.positions)
    scale = (heads.plain + heads.turned) ** -0.5 * _rope_scale(reader)
    bias = reader.boolean("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.finish()
    # transformers does not read rms_norm_eps for the norms of latent vectors.
    load: Callable[[Weights, str, int], LatentAttention] = lambda weights, name, layer: LatentAttention.load(  # noqa: E731
        weights, name, layer, heads, rope, eps=1e-6, bias=bias, scale=scale, paired=paired
    )

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        return pre_norm(weights, name, sizes, load(weights, f"{name}.self_attn", layer), sparse.load(weights, layer))

    return Architecture(sizes, (heads.spec,) * sizes.layers, {"rope": rope}, block)


def _rope_scale(reader: ConfigReader) -> float:
    """What stretching the rope (YaRN) adds to the scale of the scores."""
    scaling = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    share = scaling.get("mscale_all_dim")
    return float(yarn_scale(scaling.get("factor", 1.0), share) ** 2) if kind != "default" and share else 1.0
