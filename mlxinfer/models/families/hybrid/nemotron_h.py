"""Nemotron-H (arXiv:2504.03624): blocks of one part each: Mamba 2, attention without positions, or a feed-forward layer.

Experts may work on fewer channels than the stream has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ....cache.base import AttentionSpec, LayerSpec
from ....nn.activations import elementwise
from ....nn.attention import Attention, load_output, load_qkv
from ....nn.linear import Linear
from ....nn.mamba2 import Mamba2, MambaSizes
from ....nn.mlp import PlainMLP
from ....nn.moe import ExpertLinear, MixtureOfExperts, PlainExperts, SharedExpert
from ....nn.routes import biased_route
from ....nn.weights import Recipe, Weights, stack
from ....util.dataclass import dataclass
from ...block import SingleBlock
from ...common import FULL, LINEAR, Sizes, read_sizes
from ...config_reader import ConfigReader
from ...decoder import Architecture
from ...experts import load_bias, read_chosen_count, read_groups
from ...heads.mtp import Head, HeadNames, HeadPlan, Places, load_head, plain_norm, without_first

NEMOTRON_H = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
MLP, MOE = "mlp", "moe"
PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
HEAD = HeadNames("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm")
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}


def nemotron_h(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    types, drafting = _types(reader), _head_types(reader)
    sizes = read_sizes(reader, NEMOTRON_H | {"num_hidden_layers": len(types)})
    if sizes.layers != len(types):
        raise reader.bad("num_hidden_layers", sizes.layers, f"the number of layers in layers_block_type, {len(types)}")
    eps = reader.number("layer_norm_epsilon", 1e-5)
    mamba = _mamba(reader, sizes)
    bias, conv_bias = reader.boolean("use_bias", False), reader.boolean("use_conv_bias", True)
    mlp_bias = reader.boolean("mlp_bias", False)
    activation = elementwise(reader.text("mlp_hidden_act", "relu2"))
    experts = _GroupedExperts.read(reader, sizes, activation, mlp_bias)
    _check_the_rest(reader)
    kept = [layer for layer, kind in enumerate(types) if kind in (FULL, LINEAR)]
    load_norm = plain_norm(eps)

    def part(weights: Weights, layer: str, kind: str, place: int) -> SingleBlock:
        name, heads = f"{layer}.mixer", sizes.heads
        norm = load_norm(weights, f"{layer}.norm", sizes.hidden)
        if kind == MLP:
            return SingleBlock(norm, mlp=PlainMLP.load(weights, name, sizes.hidden, sizes.inner, activation, bias=mlp_bias))
        if kind == MOE:
            return SingleBlock(norm, mlp=experts.load(weights, name))
        if kind == LINEAR:
            loaded = Mamba2.load(weights, name, place, mamba, bias=bias, conv_bias=conv_bias, eps=eps)
            return SingleBlock(norm, loaded)
        qkv, output = load_qkv(weights, name, heads), load_output(weights, name, heads)
        return SingleBlock(norm, Attention(place, heads, qkv, output, rope=None))

    def block(weights: Weights, layer: int) -> SingleBlock:
        return part(weights, f"backbone.layers.{layer}", types[layer], kept.index(layer) if layer in kept else -1)

    def head(weights: Weights, places: Places) -> Head:
        both = [part(weights, f"mtp.layers.{i}", kind, places.own_attention) for i, kind in enumerate(drafting)]
        assert both[0].mixer is not None
        return load_head(weights, HEAD, places, sizes.hidden, load_norm, both, both[0].mixer, rope=None, normed=True)

    full = AttentionSpec(sizes.heads.kv, sizes.heads.dim, sizes.heads.dim, query_heads=sizes.heads.count)
    specs: tuple[LayerSpec, ...] = tuple(full if types[layer] == FULL else mamba.spec for layer in kept)
    return Architecture(
        sizes,
        specs,
        {},
        block,
        embedding="backbone.embeddings.weight",
        final_norm=lambda weights: load_norm(weights, "backbone.norm_f", sizes.hidden),
        mtp=HeadPlan(without_first(full), head, witness=HEAD.join) if drafting in ([FULL, MOE], [FULL, MLP]) else None,
    )


def _types(reader: ConfigReader) -> list[str]:
    pattern = reader.optional_text("hybrid_override_pattern")
    named = reader.take("layers_block_type") or reader.take("layer_types")
    reader.skip("layer_types")
    if named is None and pattern is not None:
        named = [PATTERN.get(letter, letter) for letter in pattern]
    named = [LINEAR, MOE, FULL, MLP] if named is None else named
    if not isinstance(named, list) or not named:
        raise reader.error("layers_block_type", "is missing")
    found = [OLD_NAMES.get(kind, kind) if isinstance(kind, str) else "" for kind in named]
    for kind in found:
        if kind not in PATTERN.values():
            raise reader.bad("layers_block_type", kind, f"one of {', '.join(PATTERN.values())}")
    return found


def _head_types(reader: ConfigReader) -> list[str]:
    """Return the parts of the draft head; empty without one."""
    pattern = reader.optional_text("mtp_hybrid_override_pattern")
    named = reader.take("mtp_layers_block_type")
    if named is None and pattern is not None:
        named = [PATTERN.get(letter, letter) for letter in pattern]
    return [OLD_NAMES.get(kind, kind) for kind in named if isinstance(kind, str)] if isinstance(named, list) else []


def _mamba(reader: ConfigReader, sizes: Sizes) -> MambaSizes:
    found = MambaSizes(
        sizes.hidden,
        heads=reader.integer("mamba_num_heads", 128),
        dim=reader.integer("mamba_head_dim", 64),
        state=reader.integer("ssm_state_size", 128),
        groups=reader.integer("n_groups", 8),
        taps=reader.integer("conv_kernel", 4, low=2),
        least=reader.number("time_step_min", 0.001),
    )
    if found.heads % found.groups:
        raise reader.bad("n_groups", found.groups, f"a divisor of the {found.heads} heads")
    reader.only("mamba_hidden_act", "silu")
    reader.only("mamba_proj_bias", False)
    reader.skip("time_step_limit", "time_step_max", "time_step_floor", "time_step_rank", "chunk_size", "expand", "mamba_ssm_cache_dtype")
    return found


def _check_the_rest(reader: ConfigReader) -> None:
    reader.only("sliding_window", 0)
    reader.only("hidden_dropout", 0, 0.0)
    reader.skip("attention_bias")  # transformers ignores it; bias tensors would be unexpected
    reader.skip("residual_in_fp32", "rescale_prenorm_residual", "use_mamba_kernels", "num_logits_to_keep")
    reader.skip("num_nextn_predict_layers", "moe_shared_expert_overlap")
    reader.skip("rope_theta", "rope_parameters", "partial_rotary_factor", "norm_eps", "attention_head_dim")
    reader.finish()


@dataclass(frozen=True, slots=True)
class _GroupedExperts:
    """Ungated experts in groups, selected by sigmoid and bias, with an optional shared expert."""

    hidden: int
    """Channels of the stream."""
    count: int
    """Number of experts per layer."""
    inner: int
    """Channels inside an expert."""
    shared: int
    """Channels inside the shared expert; 0 without one."""
    latent: int | None
    """Input and output channels of experts, if fewer than the stream's."""
    route: Mapping[str, Any]
    """Arguments of `biased_route`."""
    activation: Callable[[mx.array], mx.array]
    """Activation between both projections."""
    bias: bool
    """True if the projections have biases."""

    @classmethod
    def read(cls, reader: ConfigReader, sizes: Sizes, activation: Callable[[mx.array], mx.array], bias: bool) -> _GroupedExperts:
        count = reader.count("n_routed_experts", 8)
        chosen = reader.integer("num_experts_per_tok", 2) if count == 0 else read_chosen_count(reader, 2, count)
        groups, kept = read_groups(reader, count)
        normalized, scale = reader.boolean("norm_topk_prob", True), reader.number("routed_scaling_factor", 1.0)
        route = {"count": chosen, "normalized": normalized, "scale": scale, "groups": groups, "kept": kept, "added": 1e-20}
        inner, shared = reader.integer("moe_intermediate_size", 7688), reader.integer("moe_shared_expert_intermediate_size", 7688, low=0)
        latent = reader.optional_integer("moe_latent_size")
        has_shared = reader.integer("n_shared_experts", 1, low=0) > 0
        return cls(sizes.hidden, count, inner, shared if has_shared else 0, latent, route, activation, bias)

    def load(self, weights: Weights, name: str) -> MixtureOfExperts:
        hidden = self.latent or self.hidden
        router = Linear.load(weights, f"{name}.gate", self.count, self.hidden, quantizable=False)
        route = biased_route(bias=load_bias(weights, f"{name}.gate.e_score_correction_bias", self.count), **self.route)
        up, down = (
            self._expert(weights, name, "up_proj", (self.inner, hidden)),
            self._expert(weights, name, "down_proj", (hidden, self.inner)),
        )
        shared = PlainMLP.load(weights, f"{name}.shared_experts", self.hidden, self.shared, self.activation, bias=self.bias)
        return MixtureOfExperts(
            router,
            route,
            PlainExperts(up, down, self.activation),
            SharedExpert(shared) if self.shared else None,
            Linear.load(weights, f"{name}.fc1_latent_proj", hidden, self.hidden, bias=self.bias) if self.latent else None,
            Linear.load(weights, f"{name}.fc2_latent_proj", self.hidden, hidden, bias=self.bias) if self.latent else None,
        )

    def _expert(self, weights: Weights, name: str, part: str, shape: tuple[int, int]) -> ExpertLinear:
        single = tuple(f"{name}.experts.{expert}.{part}.weight" for expert in range(self.count))
        whole = (self.count, *shape)
        recipes = [Recipe(single, (shape,) * self.count, stack), Recipe((f"{name}.experts.{part}",), (whole,), lambda s: s[0])]
        # mlx-lm's names: fc1 and fc2.
        own = f"{name}.switch_mlp.{'fc1' if part == 'up_proj' else 'fc2'}"
        return ExpertLinear.load_experts(weights, own, whole, otherwise=recipes)
