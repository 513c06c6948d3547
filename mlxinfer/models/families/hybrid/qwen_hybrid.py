"""Qwen3-Next and the text models of Qwen3.5: mostly gated delta nets, with gated attention every few layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ....cache.base import AttentionSpec, LayerSpec, Rotation, Step
from ....kernels_cpu import View
from ....nn.activations import Gate, gated
from ....nn.attention import Attention, load_output
from ....nn.gated_delta import DeltaSizes, GatedDelta
from ....nn.linear import JoinedLinear, Linear, NamedProjection
from ....nn.mlp import GatedMLP
from ....nn.moe import MixtureOfExperts, SharedExpert
from ....nn.norms import RMSNorm
from ....nn.rope import Rope
from ....nn.routes import Route, softmax_then_top
from ....nn.weights import Matrix, Recipe, Weights, load_convolution, map_rows
from ...block import Block, FeedForward, Mixer, Norms, gated_mlp, is_sparse_layer
from ...common import FULL, LINEAR, Sizes, every, read_layer_types, read_sizes
from ...config_reader import ConfigReader
from ...decoder import Architecture
from ...experts import load_experts, read_chosen_count, read_expert_count
from ...heads.mtp import QWEN, Head, HeadPlan, Places, load_head, without_first
from ...native.cpu_program import Accumulator, ProgramBuilder
from ...rope_config import MRopeLayout, read_rope

QWEN3_NEXT = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}
QWEN3_5 = QWEN3_NEXT | {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}

QWEN3_5_MOE = QWEN3_NEXT | {"vocab_size": 248320, "num_hidden_layers": 40}

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "mlp_only_layers": ([],),
    "output_gate_type": ("silu", "swish"),
    "rope_type": ("default",),
}
"""Keys of published configs that are not implemented, to the only values that match the implementation."""

_MROPE = MRopeLayout(interleaved=True, sections=(11, 11, 10))
LoadInputs = Callable[[Weights, str, DeltaSizes], list[Linear]]
LoadMLP = Callable[[Weights, str, int], FeedForward]
"""Loads the feed-forward layer of (name, number); a draft head has the last layer's number."""


def qwen3_next(config: dict[str, Any]) -> Architecture:
    """Build Qwen3-Next: routed and shared experts; two matrices, interleaved by key head, for the delta net's inputs."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, QWEN3_NEXT)
    gate = gated(sizes.activation)
    moe = _SharedExperts.read(reader, sizes, count=512, chosen=10, normalized=reader.boolean("norm_topk_prob", True))
    sparse = is_sparse_layer(reader, moe.shape[0])

    def mlp(weights: Weights, name: str, layer: int) -> FeedForward:
        return moe.load(weights, name) if sparse(layer) else gated_mlp(weights, name, sizes, gate)

    return _architecture(reader, sizes, mlp, _interleaved_inputs, MRopeLayout(interleaved=True))


def qwen3_5_text(config: dict[str, Any]) -> Architecture:
    """Build Qwen3.5: dense, with one matrix per input of the delta net."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, QWEN3_5)
    gate = gated(sizes.activation)
    _check_the_rest(reader)
    if reader.values.get("num_experts", 0) == 0:
        reader.skip("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    return _architecture(reader, sizes, lambda weights, name, _: gated_mlp(weights, name, sizes, gate), _separate_inputs, _MROPE)


def qwen3_5_moe_text(config: dict[str, Any]) -> Architecture:
    """Build Qwen3.5 with routed and shared experts in every layer."""
    reader = ConfigReader(config)
    reader.skip("intermediate_size")
    sizes = read_sizes(reader, QWEN3_5_MOE)
    _check_the_rest(reader)
    reader.only("decoder_sparse_step", 1)
    reader.only("norm_topk_prob", True)
    moe = _SharedExperts.read(reader, sizes, count=256, chosen=8, normalized=True)
    return _architecture(reader, sizes, lambda weights, name, _: moe.load(weights, name), _separate_inputs, _MROPE)


def _check_the_rest(reader: ConfigReader) -> None:
    for key, allowed in _WITHOUT_EFFECT.items():
        reader.only(key, *allowed)
    reader.only("use_qk_norm", True)
    reader.skip("mrope_interleaved", "mrope_section")


@dataclass(frozen=True, slots=True)
class _SharedExperts:
    """Experts of a layer, and a gated shared expert."""

    shape: tuple[int, int, int]
    """(experts, channels inside, channels of the stream)."""
    shared: int
    """Channels inside the shared expert."""
    route: Route
    gate: Gate
    """Gated unit of all experts."""

    @classmethod
    def read(cls, reader: ConfigReader, sizes: Sizes, *, count: int, chosen: int, normalized: bool) -> _SharedExperts:
        count = read_expert_count(reader, count)
        shape = (count, reader.integer("moe_intermediate_size", 512), sizes.hidden)
        route = softmax_then_top(read_chosen_count(reader, chosen, count), normalized=normalized)
        return cls(shape, reader.integer("shared_expert_intermediate_size", 512), route, gated(sizes.activation))

    def load(self, weights: Weights, layer: str) -> MixtureOfExperts:
        name, (count, _, hidden) = f"{layer}.mlp", self.shape
        router = Linear.load(weights, f"{name}.gate", count, hidden, quantizable=False)
        experts = load_experts(weights, f"{name}.switch_mlp", f"{name}.experts", self.shape, self.gate)
        shared_gate = Linear.load(weights, f"{name}.shared_expert_gate", 1, hidden, quantizable=False)
        shared_mlp = GatedMLP.load(weights, f"{name}.shared_expert", hidden, self.shared, self.gate)
        return MixtureOfExperts(router, self.route, experts, SharedExpert(shared_mlp, shared_gate))


def _architecture(reader: ConfigReader, sizes: Sizes, mlp: LoadMLP, load_inputs: LoadInputs, mrope: MRopeLayout) -> Architecture:
    delta = DeltaSizes(
        sizes.hidden,
        key_heads=reader.integer("linear_num_key_heads", 16),
        value_heads=reader.integer("linear_num_value_heads", 32),
        key_dim=reader.integer("linear_key_head_dim", 128),
        value_dim=reader.integer("linear_value_head_dim", 128),
        taps=reader.integer("linear_conv_kernel_dim", 4, low=2),
    )
    if delta.value_heads % delta.key_heads:
        raise reader.bad("linear_num_value_heads", delta.value_heads, f"a multiple of linear_num_key_heads, {delta.key_heads}")
    reader.only("hidden_act", "silu", "swish")
    interval = reader.integer("full_attention_interval", 4)
    types = read_layer_types(reader, (FULL, LINEAR), sizes.layers, every(interval, FULL, LINEAR))
    rope = read_rope(reader, sizes.heads.dim, sizes.positions, partial=0.25, mrope=mrope)
    bias = reader.boolean("attention_bias", False)
    shares = not reader.boolean("mtp_use_dedicated_embeddings", False) and reader.integer("mtp_num_hidden_layers", 1, low=0) == 1
    reader.finish()
    norms = _Norms(sizes.eps, delta, f"model.layers.{types.index(LINEAR)}.linear_attn.conv1d.weight" if LINEAR in types else None)

    def block(weights: Weights, layer: int) -> Block:
        name = f"model.layers.{layer}"
        mixer: Mixer
        if types[layer] == LINEAR:
            mixer = _load_delta(weights, f"{name}.linear_attn", layer, sizes, delta, load_inputs)
        else:
            mixer = GatedAttention.load(weights, f"{name}.self_attn", layer, sizes, rope, norms, bias=bias)
        return whole_block(weights, name, layer, mixer)

    def whole_block(weights: Weights, name: str, layer: int, mixer: Mixer) -> Block:
        both = Norms(
            before_mixer=norms.load(weights, f"{name}.input_layernorm", sizes.hidden),
            before_mlp=norms.load(weights, f"{name}.post_attention_layernorm", sizes.hidden),
        )
        return Block(mixer, mlp(weights, name, layer), both)

    def head(weights: Weights, places: Places) -> Head:
        name = "mtp.layers.0"
        mixer = GatedAttention.load(weights, f"{name}.self_attn", places.own_attention, sizes, rope, norms, bias=bias)
        block = whole_block(weights, name, sizes.layers - 1, mixer)
        return load_head(weights, QWEN, places, sizes.hidden, norms.load, [block], mixer, normed=True)

    heads = sizes.heads
    full = AttentionSpec(heads.kv, heads.dim, heads.dim, query_heads=heads.count)
    specs: tuple[LayerSpec, ...] = tuple(delta.spec if kind == LINEAR else full for kind in types)
    return Architecture(
        sizes,
        specs,
        {"rope": rope},
        block,
        final_norm=lambda weights: norms.load(weights, "model.norm", sizes.hidden),
        mtp=HeadPlan(without_first(full), head) if shares else None,
    )


@dataclass(frozen=True, slots=True)
class _Norms:
    """Loader of norms, which Hugging Face stores around zero and mlx-lm around one under the same name.

    The axes of a convolution, `witness`, decide, because mlx-lm's conversion also transposes them. A model without one counts as Hugging
    Face's.
    """

    eps: float
    delta: DeltaSizes
    witness: str | None

    def load(self, weights: Weights, name: str, size: int) -> RMSNorm:
        if self.witness is None:
            return RMSNorm.load(weights, name, size, self.eps, centred=True)
        shapes = (size,), (self.delta.channels, 1, self.delta.taps)
        recipe = Recipe((f"{name}.weight", self.witness), shapes, _add_one)
        return RMSNorm(weights.vector(f"{name}.weight", (size,), otherwise=[recipe]), self.eps)


def _add_one(sources: list[Matrix]) -> Matrix:
    return map_rows(sources[0], lambda weight: 1 + weight.astype(mx.float32))


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Attention whose output is multiplied per channel by a sigmoid of the second half of the query projection."""

    attention: Attention
    """Attention with queries of the usual size."""
    inputs: JoinedLinear
    """Joined projections of queries with gates `[T, heads * 2 * dim]`, keys and values."""

    @classmethod
    def load(cls, weights: Weights, name: str, layer: int, sizes: Sizes, rope: Rope, norms: _Norms, *, bias: bool) -> GatedAttention:
        heads = sizes.heads
        wide = [2 * heads.sizes[0], *heads.sizes[1:]]
        names = [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        parts = [Linear.load(weights, part, size, sizes.hidden, bias=bias) for part, size in zip(names, wide, strict=True)]
        q_norm = norms.load(weights, f"{name}.q_norm", heads.dim)
        k_norm = norms.load(weights, f"{name}.k_norm", heads.dim)
        inputs, output = JoinedLinear(parts, wide), load_output(weights, name, heads, bias=bias)
        return cls(Attention(layer, heads, inputs, output, rope=rope, q_norm=q_norm, k_norm=k_norm), inputs)

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        heads = self.attention.heads
        both, k, v = self.inputs(x, norm=norm)
        q, gate = mx.split(both.reshape(-1, heads.count, 2 * heads.dim), 2, axis=-1)
        q, k, v = self.attention.heads_of(q, k, v, rotation=rotation)
        y = self.attention.attend(q, k, v, step)
        return self.attention.output(y * mx.sigmoid(gate.reshape(y.shape)), onto=onto)

    def natively(self, builder: ProgramBuilder, x: View, norm: RMSNorm | None, sink: Accumulator, rope: str | None) -> None:
        """Add the instructions for the CPU kernels. A head's queries and gates are adjacent."""
        heads = self.attention.heads
        both, k, v = builder.split(self.inputs, x, "projected", norm=norm)
        y = builder.attend(self.attention, both, k, v, rope, step=2 * heads.dim)
        gate = both.columns(heads.dim, both.count - heads.dim)
        builder.program.gate(y, gate, "sigmoid", y, parts=heads.count, step=2 * heads.dim)
        sink.product(self.attention.output, y)


def _load_delta(weights: Weights, name: str, layer: int, sizes: Sizes, delta: DeltaSizes, load_inputs: LoadInputs) -> GatedDelta:
    parts = load_inputs(weights, name, delta)
    return GatedDelta(
        layer,
        delta,
        JoinedLinear(parts, [delta.channels, delta.value_heads, delta.value_heads, delta.values]),
        Linear.load(weights, f"{name}.out_proj", sizes.hidden, delta.values),
        convolution=load_convolution(weights, f"{name}.conv1d", delta.channels, delta.taps),
        decay=weights.vector(f"{name}.A_log", (delta.value_heads,), dtype=mx.float32),
        decay_bias=weights.vector(f"{name}.dt_bias", (delta.value_heads,), dtype=mx.float32),
        norm=weights.vector(f"{name}.norm.weight", (delta.value_dim,)),
        eps=sizes.eps,
    )


def _separate_inputs(weights: Weights, name: str, delta: DeltaSizes) -> list[Linear]:
    sizes = {"qkv": delta.channels, "b": delta.value_heads, "a": delta.value_heads, "z": delta.values}
    return [Linear.load(weights, f"{name}.in_proj_{part}", size, delta.hidden) for part, size in sizes.items()]


def _interleaved_inputs(weights: Weights, name: str, delta: DeltaSizes) -> list[Linear]:
    """Split matrices ordered by key head: `qkvz` has each head's query, key, values and gates, `ba` its betas and decays."""
    qkvz = weights.matrix(f"{name}.in_proj_qkvz.weight", (delta.channels + delta.values, delta.hidden))
    ba = weights.matrix(f"{name}.in_proj_ba.weight", (2 * delta.value_heads, delta.hidden))
    each = delta.value_heads // delta.key_heads
    q, k, v, z = _rows_by_part(delta.key_heads, [delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim])
    beta, decay = _rows_by_part(delta.key_heads, [each, each])
    of_qkvz, of_ba = (qkvz, f"{name}.in_proj_qkvz"), (ba, f"{name}.in_proj_ba")
    rows = [(of_qkvz, np.concatenate([q, k, v])), (of_ba, beta), (of_ba, decay), (of_qkvz, z)]
    return [Linear(_pick(matrix, some), None, (NamedProjection(whole, len(some), some, in_parts=True),)) for (matrix, whole), some in rows]


def _rows_by_part(heads: int, widths: list[int]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the row numbers of each part of a matrix with consecutive heads of consecutive parts."""
    rows = np.arange(heads * sum(widths)).reshape(heads, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(widths)[:-1], axis=1)]


def _pick(matrix: Matrix, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Matrix:
    wanted = mx.array(rows)
    return map_rows(matrix, lambda array: array[wanted])
