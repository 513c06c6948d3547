"""Gemma 4: windows with narrow heads, full layers with wide heads.

Keys may serve as values in full layers. Late layers may read the pages of earlier ones. Layers may have per-layer inputs, and experts
beside the MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import mlx.core as mx

from ...cache.base import AttentionSpec
from ...nn.activations import Gate, gated
from ...nn.attention import Heads
from ...nn.linear import Embedding, Linear
from ...nn.mlp import GatedMLP
from ...nn.norms import RMSNorm
from ...nn.rope import Rope
from ...nn.routes import softmax_then_top
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from ..common import FULL, SLIDING, Sizes, every, read_layer_types, read_sizes
from ..config_reader import ConfigReader
from ..decoder import Architecture
from ..experts import load_experts, read_expert_count
from ..rope_config import read_rope_by_layer
from .gemma4_block import Gemma4Attention, Gemma4Block, OwnInput, ParallelExperts

ALL_SEE_SPANS = "_all_see_spans"
"""Key of a text config: the rows of an image see one another in all layers, and no window hides any of them, as in the forward pass of
`gemma4_unified` in transformers 5.24. In `gemma4` only layers with a window see spans, and the window limits their past."""

GEMMA4 = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
}


def gemma4_text(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, GEMMA4, activation_key="hidden_activation")
    plan = _AttentionPlan.read(reader, sizes)
    ropes = read_ropes(reader, plan.kinds, sizes, partial=reader.optional_number("partial_rotary_factor") or 0.25)
    cap = reader.optional_number("final_logit_softcapping")
    experts = _ExpertSizes.read(reader, sizes)
    own, vocab = reader.integer("hidden_size_per_layer_input", 256, low=0), reader.integer("vocab_size_per_layer_input", 262144)
    pad = reader.take("pad_token_id")
    pad = pad if isinstance(pad, int) and 0 <= pad < vocab else 0
    _check_the_rest(reader)
    gate = gated(sizes.activation)

    def block(weights: Weights, layer: int) -> Gemma4Block:
        name, hidden, eps = f"model.layers.{layer}", sizes.hidden, sizes.eps
        inner = sizes.inner * (2 if plan.wide and plan.source(layer) != layer else 1)
        return Gemma4Block(
            plan.load_attention(weights, f"{name}.self_attn", layer, eps),
            GatedMLP.load(weights, f"{name}.mlp", hidden, inner, gate),
            load_norms(weights, name, sizes),
            rope=plan.kinds.types[layer],
            factor=load_factor(weights, name),
            experts=experts.load(weights, name, sizes, gate) if experts else None,
            own=OwnInput.load(weights, name, hidden, own, sizes.activation, eps) if own else None,
        )

    return Architecture(
        sizes,
        plan.specs(),
        ropes,
        block,
        embedding_scale=sizes.hidden**0.5,
        logit_cap=cap,
        inputs=(lambda weights: LayerEmbeddings.load(weights, sizes, vocab, own, pad)) if own else None,
    )


def load_norms(weights: Weights, name: str, sizes: Sizes) -> list[RMSNorm]:
    """Load the four norms of a block: before and after attention, before and after the MLP."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return [RMSNorm.load(weights, f"{name}.{part}", sizes.hidden, sizes.eps) for part in names]


def load_factor(weights: Weights, name: str) -> float:
    """Load the factor of a block's result."""
    return cast("float", weights.vector(f"{name}.layer_scalar", (1,)).item())


def _check_the_rest(reader: ConfigReader) -> None:
    reader.only("attention_bias", False)
    reader.only("use_qk_norm", True)
    # Gemma 4 does not scale scores, whatever its converters wrote.
    reader.skip("hidden_act", "query_pre_attn_scalar")
    reader.finish()


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of layers and their sizes."""

    types: list[str]
    """Kind of each layer."""
    heads: dict[str, Heads]
    """Sizes of attention, by kind."""
    window: int
    keys_are_values: bool
    """True if full layers have no value projection."""

    @classmethod
    def read(cls, reader: ConfigReader, sizes: Sizes) -> Kinds:
        """Read the kinds from a config. Raises `UnsupportedModelError`."""
        types = read_layer_types(reader, (FULL, SLIDING), sizes.layers, every(reader.integer("sliding_window_pattern", 6), FULL, SLIDING))
        types[-1] = FULL
        narrow, same = sizes.heads, reader.boolean("attention_k_eq_v", False)
        kv = reader.optional_integer("num_global_key_value_heads")
        dim = reader.integer("global_head_dim", 512)
        dim, kv = _overridden(reader, types, narrow.dim) or (dim, kv if same else None)
        wide = Heads(narrow.hidden, narrow.count, kv or narrow.kv, dim)
        if wide.count % wide.kv:
            raise reader.bad("num_global_key_value_heads", wide.kv, f"a divisor of the {wide.count} attention heads")
        return cls(types, {FULL: wide, SLIDING: narrow}, reader.integer("sliding_window", 512), same)

    def window_of(self, kind: str) -> int | None:
        """Return the window of a kind in tokens; None for all."""
        return self.window if kind == SLIDING else None


def read_ropes(reader: ConfigReader, kinds: Kinds, sizes: Sizes, *, partial: float) -> dict[str, Rope]:
    """Read the ropes by kind of layer. Raises `UnsupportedModelError`.

    `partial` is the fraction of a full layer's channels that rotates, for a config without `rope_parameters`.
    """
    dims = {kind: heads.dim for kind, heads in kinds.heads.items()}
    theta = {FULL: ("rope_theta", 1000000.0), SLIDING: ("rope_local_base_freq", 10000.0)}
    others = None if reader.values.get("rope_parameters") else {FULL: {"rope_type": "proportional", "partial_rotary_factor": partial}}
    return read_rope_by_layer(reader, dims, sizes.positions, theta=theta, scaled=FULL, others=others)


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """Sources of the pages that layers read."""

    kinds: Kinds
    first_shared: int
    """First layer without keys and values; such layers read those of the last earlier layer of their kind."""
    wide: bool
    """True if layers without keys and values have an MLP of twice the channels."""
    sees_spans: bool
    """True if the rows of an image see one another in layers with a window."""
    all_see_spans: bool
    """See `ALL_SEE_SPANS`."""

    @classmethod
    def read(cls, reader: ConfigReader, sizes: Sizes) -> _AttentionPlan:
        kinds = Kinds.read(reader, sizes)
        types, first = kinds.types, sizes.layers - reader.integer("num_kv_shared_layers", 0, low=0)
        if first < sizes.layers and not set(types[first:]) <= set(types[: max(first, 0)]):
            raise reader.bad("num_kv_shared_layers", sizes.layers - first, "so that a layer of each kind keeps keys and values")
        wide = reader.boolean("use_double_wide_mlp", False)
        seen = reader.take("use_bidirectional_attention")
        if seen not in (None, False, "vision"):
            raise reader.bad("use_bidirectional_attention", seen, "'vision' or False")
        return cls(kinds, first, wide, seen == "vision", reader.boolean(ALL_SEE_SPANS, False))

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values this layer reads."""
        if layer < self.first_shared:
            return layer
        types = self.kinds.types
        return max(other for other in range(self.first_shared) if types[other] == types[layer])

    def specs(self) -> tuple[AttentionSpec, ...]:
        read = {self.source(layer) for layer in range(self.first_shared, len(self.kinds.types))}
        found = []
        for layer, kind in enumerate(self.kinds.types[: self.first_shared]):
            heads, window = self.kinds.heads[kind], self.kinds.window_of(kind)
            spec = AttentionSpec(heads.kv, heads.dim, heads.dim, window, heads.count, shared=layer in read)
            sees = self.sees_spans and (self.all_see_spans or kind == SLIDING)
            found.append(replace(spec, sees_spans=sees, whole_spans=sees and self.all_see_spans))
        return tuple(found)

    def load_attention(self, weights: Weights, name: str, layer: int, eps: float) -> Gemma4Attention:
        kind, source = self.kinds.types[layer], self.source(layer)
        parts = ["q_proj", "k_proj", "v_proj"][: 2 if self.kinds.keys_are_values and kind == FULL else 3]
        return Gemma4Attention.load(weights, name, source, self.kinds.heads[kind], parts if source == layer else parts[:1], eps)


def _overridden(reader: ConfigReader, types: list[str], narrow: int) -> tuple[int, int | None] | None:
    """Return (channels, KV heads) of full layers from transformers 5's `per_layer_config`; None without one.

    The key lists the differences from the other layers, which have `narrow` channels.
    """
    by_layer = reader.take("per_layer_config")
    if by_layer is None:
        return None
    if by_layer == {}:
        return narrow, None
    full = {layer for layer, kind in enumerate(types) if kind == FULL}
    numbered = isinstance(by_layer, dict) and all(str(key).isdecimal() for key in by_layer)
    given = list(by_layer.values()) if numbered and {int(key) for key in by_layer} == full else []
    if not given or any(other != given[0] or not isinstance(other, dict) for other in given):
        raise reader.bad("per_layer_config", by_layer, "the same for every full layer, and for no other")
    own = ConfigReader(given[0])
    found = own.integer("head_dim", narrow), own.optional_integer("num_key_value_heads")
    own.finish()
    return found


@dataclass(frozen=True, slots=True)
class _ExpertSizes:
    """Sizes of the experts."""

    count: int
    chosen: int
    """Number of experts per token."""
    inner: int
    """Channels inside an expert."""

    @classmethod
    def read(cls, reader: ConfigReader, sizes: Sizes) -> _ExpertSizes | None:
        if not reader.boolean("enable_moe_block", False):
            reader.skip("num_experts", "top_k_experts", "moe_intermediate_size", "num_local_experts", "expert_intermediate_size")
            return None
        count = read_expert_count(reader, 128)
        chosen = reader.integer("top_k_experts", 8, high=count)
        return cls(count, chosen, reader.integer("moe_intermediate_size", sizes.inner))

    def load(self, weights: Weights, name: str, sizes: Sizes, gate: Gate) -> ParallelExperts:
        hidden, eps = sizes.hidden, sizes.eps
        names = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        shape = (self.count, self.inner, hidden)
        scale = weights.vector(f"{name}.router.scale", (hidden,)) * hidden**-0.5
        gains = weights.vector(f"{name}.router.per_expert_scale", (self.count,), dtype=mx.float32)
        return ParallelExperts(
            RMSNorm(scale, eps),
            Linear.load(weights, f"{name}.router.proj", self.count, hidden, quantizable=False),
            softmax_then_top(self.chosen, normalized=True, gains=gains),
            load_experts(weights, f"{name}.experts.switch_glu", f"{name}.experts", shape, gate),
            [RMSNorm.load(weights, f"{name}.{part}", hidden, eps) for part in names],
        )


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """Implements `LayerInputs`: a second embedding of the token, added to a projection of its usual embedding."""

    table: Embedding
    """`[vocab, layers * n]`."""
    projection: Linear
    """`[layers * n, hidden]`."""
    norm: RMSNorm
    """Norm of the projection, weight `[n]`."""
    layers: int
    given_token: int
    """See `LayerInputs`."""

    @property
    def width(self) -> int:
        return int(self.norm.weight.shape[0])

    @classmethod
    def load(cls, weights: Weights, sizes: Sizes, vocab: int, size: int, pad: int) -> LayerEmbeddings:
        norm = RMSNorm.load(weights, "model.per_layer_projection_norm", size, sizes.eps)
        table = Embedding(weights.matrix("model.embed_tokens_per_layer.weight", (vocab, sizes.layers * size)), norm.weight.dtype)
        projection = Linear.load(weights, "model.per_layer_model_projection", sizes.layers * size, sizes.hidden)
        return cls(table, projection, norm, sizes.layers, pad)

    def __call__(self, tokens: mx.array, x: mx.array) -> mx.array:
        rows, size = x.shape[0], self.norm.weight.shape[0]
        projected = (self.projection(x) * x.shape[-1] ** -0.5).reshape(rows, self.layers, size)
        named = (self.table(tokens) * size**0.5).reshape(rows, self.layers, size)
        both: mx.array = (self.norm(projected) + named) * mx.array(2**-0.5, x.dtype)
        return mx.swapaxes(both, 0, 1)
