"""Granite 4: Granite with mostly Mamba 2 mixers, optional positions in attention, and experts beside a shared MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....cache.base import AttentionSpec, LayerSpec
from ....nn.activations import gated
from ....nn.attention import Attention, load_output, load_qkv
from ....nn.linear import JoinedLinear, Linear
from ....nn.mamba2 import Mamba2, MambaSizes
from ....nn.mlp import GatedMLP
from ....nn.moe import ExpertLinear, Experts, MixtureOfExperts, SharedExpert
from ....nn.routes import top_then_softmax
from ....nn.weights import Recipe, Weights, map_rows
from ...block import Block, FeedForward, Mixer, pre_norm
from ...common import FULL, LINEAR, Sizes, read_sizes
from ...config_reader import ConfigReader
from ...decoder import Architecture
from ...experts import read_chosen_count, read_expert_count
from ...rope_config import read_rope

GRANITE4 = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}

LoadMLP = Callable[[Weights, int], FeedForward]


def granitemoehybrid(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GRANITE4)
    heads = sizes.heads
    types = _types(reader, sizes.layers)
    mamba = _mamba(reader, sizes)
    bias, conv_bias = reader.boolean("mamba_proj_bias", False), reader.boolean("mamba_conv_bias", True)
    attention_bias = reader.boolean("attention_bias", False)
    rotates = reader.optional_text("position_embedding_type") == "rope"
    reader.only("position_embedding_type", "rope", "nope")
    rope = read_rope(reader, heads.dim, sizes.positions)
    scale, residual = reader.number("attention_multiplier", 1.0), reader.number("residual_multiplier", 1.0)
    embedding_scale, logit_scale = reader.number("embedding_multiplier", 1.0), 1 / reader.nonzero("logits_scaling", 1.0)
    mlp = _read_mlp(reader, sizes)
    reader.only("normalization_function", "rmsnorm")
    reader.only("init_method", "mup")
    reader.skip("mamba_chunk_size", "hidden_dropout")
    reader.finish()

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        mixer: Mixer
        if types[layer] == LINEAR:
            mixer = Mamba2.load(weights, f"{name}.mamba", layer, mamba, bias=bias, conv_bias=conv_bias, eps=sizes.eps)
        else:
            qkv = load_qkv(weights, f"{name}.self_attn", heads, bias=attention_bias)
            output = load_output(weights, f"{name}.self_attn", heads, bias=attention_bias)
            mixer = Attention(layer, heads, qkv, output, rope=rope if rotates else None, scale=scale)
        return pre_norm(weights, name, sizes, mixer, mlp(weights, layer), rope="rope" if rotates else None, residual=residual)

    full = AttentionSpec(heads.kv, heads.dim, heads.dim, query_heads=heads.count)
    specs: tuple[LayerSpec, ...] = tuple(mamba.spec if kind == LINEAR else full for kind in types)
    ropes = {"rope": rope} if rotates else {}
    return Architecture(sizes, specs, ropes, block, embedding_scale=embedding_scale, logit_scale=logit_scale)


def _types(reader: ConfigReader, layers: int) -> list[str]:
    named = reader.take("layer_types") or reader.take("layers_block_type") or [LINEAR] * layers
    reader.skip("layers_block_type")
    found = [OLD_NAMES.get(kind, kind) if isinstance(kind, str) else "" for kind in named] if isinstance(named, list) else []
    if len(found) != layers or set(found) - {FULL, LINEAR}:
        raise reader.bad("layer_types", named, f"{FULL} or {LINEAR} for each of {layers} layers")
    return found


def _mamba(reader: ConfigReader, sizes: Sizes) -> MambaSizes:
    count, expand = reader.integer("mamba_n_heads", 128), reader.integer("mamba_expand", 2)
    dim = reader.take("mamba_d_head", "auto")
    found = MambaSizes(
        sizes.hidden,
        heads=count,
        dim=expand * sizes.hidden // count if dim == "auto" else reader.integer("mamba_d_head"),
        state=reader.integer("mamba_d_state", 256),
        groups=reader.integer("mamba_n_groups", 1),
        taps=reader.integer("mamba_d_conv", 4, low=2),
    )
    if found.heads % found.groups or found.inner != expand * sizes.hidden:
        raise reader.bad("mamba_n_heads", count, "a multiple of mamba_n_groups, and with mamba_d_head the width of mamba_expand")
    check_step_limit(reader)
    return found


def check_step_limit(reader: ConfigReader) -> None:
    """Accept only an unlimited range of time steps."""
    limit = reader.take("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or len(limit) != 2 or limit[0] != 0 or _finite(limit[1])):
        raise reader.bad("time_step_limit", limit, "from 0 to infinity")


def _finite(value: object) -> bool:
    return value not in (float("inf"), {"__float__": "Infinity"}, "Infinity")


def _read_mlp(reader: ConfigReader, sizes: Sizes) -> LoadMLP:
    gate, hidden = gated(sizes.activation), sizes.hidden
    inner = reader.integer("shared_intermediate_size", 1024)
    count = read_expert_count(reader, 8)
    chosen = read_chosen_count(reader, 2, count) if count else reader.take("num_experts_per_tok")

    def load(weights: Weights, layer: int) -> FeedForward:
        name, moe = f"model.layers.{layer}.shared_mlp", f"model.layers.{layer}.block_sparse_moe"
        gate_up = Linear.load(weights, f"{name}.input_linear", 2 * inner, hidden)
        down = Linear.load(weights, f"{name}.output_linear", hidden, inner)
        mlp = GatedMLP(JoinedLinear.fused(gate_up, [inner, inner]), down, gate)
        if not count:
            return mlp
        router = Linear.load(weights, f"{moe}.router.layer", count, hidden, quantizable=False)
        return MixtureOfExperts(router, top_then_softmax(chosen), _load_experts(weights, moe, count, sizes), SharedExpert(mlp))

    return load


def _load_experts(weights: Weights, name: str, count: int, sizes: Sizes) -> Experts:
    inner, hidden = sizes.inner, sizes.hidden

    def half(part: str, rows: slice) -> ExpertLinear:
        stored = Recipe((f"{name}.input_linear.weight",), ((count, 2 * inner, hidden),), lambda s: map_rows(s[0], lambda a: a[:, rows]))
        return ExpertLinear.load_experts(weights, f"{name}.switch_mlp.{part}", (count, inner, hidden), otherwise=[stored])

    stored = Recipe((f"{name}.output_linear.weight",), ((count, hidden, inner),), lambda sources: sources[0])
    down = ExpertLinear.load_experts(weights, f"{name}.switch_mlp.down_proj", (count, hidden, inner), otherwise=[stored])
    parts = [half("gate_proj", slice(0, inner)), half("up_proj", slice(inner, None))]
    return Experts(JoinedLinear(parts, [inner, inner]), down, gated(sizes.activation))
