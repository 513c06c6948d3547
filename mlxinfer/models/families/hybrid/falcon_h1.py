"""Falcon-H1 (arXiv:2507.22448): parallel attention and Mamba 2 in every block, with many constant multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ....cache.base import AttentionSpec, LayerSpec, Rotation, Step
from ....nn.activations import Gate, ScaledGate, elementwise, fused
from ....nn.attention import Attention, load_output, load_qkv
from ....nn.mamba2 import Mamba2, MambaSizes
from ....nn.mlp import GatedMLP
from ....nn.norms import RMSNorm
from ....nn.residual_stream import ResidualStream
from ....nn.weights import Weights
from ....util.dataclass import dataclass
from ...block import Norms
from ...common import Sizes, read_sizes
from ...config_reader import ConfigReader
from ...decoder import Architecture
from ...rope_config import read_rope
from .granite_hybrid import check_step_limit

if TYPE_CHECKING:
    from ...native.cpu_program import ProgramBuilder

FALCON_H1 = {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


def falcon_h1(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    sizes = read_sizes(reader, FALCON_H1)
    heads = sizes.heads
    mamba = _mamba(reader, sizes)
    how: Mapping[str, Any] = {
        "conv_bias": reader.boolean("mamba_conv_bias", True),
        "normed": reader.boolean("mamba_rms_norm", False),
        "norm_first": reader.boolean("mamba_norm_before_gate", True),
        "gains": mx.array(_gains(reader, mamba), mx.float32),
    }
    multipliers = Multipliers.read(reader)
    gate = _gate(sizes.activation, *_multiplier_list(reader, "mlp_multipliers", 2))
    rope = read_rope(reader, heads.dim, sizes.positions)
    embedding_scale, logit_scale = reader.number("embedding_multiplier", 1.0), reader.number("lm_head_multiplier", 1.0)
    _check_the_rest(reader)

    def block(weights: Weights, layer: int) -> FalconBlock:
        name, hidden = f"model.layers.{layer}", sizes.hidden
        qkv, output = load_qkv(weights, f"{name}.self_attn", heads), load_output(weights, f"{name}.self_attn", heads)
        return FalconBlock(
            Attention(2 * layer + 1, heads, qkv, output, rope=rope, scale=heads.dim**-0.5 * multipliers.scores),
            Mamba2.load(weights, f"{name}.mamba", 2 * layer, mamba, bias=False, eps=sizes.eps, **how),
            GatedMLP.load(weights, f"{name}.feed_forward", hidden, sizes.inner, gate),
            RMSNorm.load(weights, f"{name}.input_layernorm", hidden, sizes.eps),
            RMSNorm.load(weights, f"{name}.pre_ff_layernorm", hidden, sizes.eps),
            multipliers,
        )

    specs: tuple[LayerSpec, ...] = (mamba.spec, AttentionSpec(heads.kv, heads.dim, heads.dim, query_heads=heads.count))
    return Architecture(
        sizes,
        specs * sizes.layers,
        {"rope": rope},
        block,
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        final_norm=lambda weights: RMSNorm.load(weights, "model.final_layernorm", sizes.hidden, sizes.eps),
    )


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constant multipliers of a block."""

    scores: float
    """Additional factor of the attention scores."""
    attention: float
    """Factor of the attention's result."""
    mamba: float
    """Factor of the Mamba layer's result."""

    @classmethod
    def read(cls, reader: ConfigReader) -> Multipliers:
        """Read the multipliers. The factor of the attention's input applies to queries, keys and values."""
        read = reader.number("attention_in_multiplier", 1.0)
        return cls(
            read**2 * reader.number("key_multiplier", 1.0),
            read * reader.number("attention_out_multiplier", 1.0),
            reader.number("ssm_out_multiplier", 1.0),
        )


@dataclass(frozen=True, slots=True)
class FalconBlock:
    """Block `x + a * attention(norm(x)) + m * mamba(norm(x))`, followed by a feed-forward layer."""

    attention: Attention
    mamba: Mamba2
    mlp: GatedMLP
    before: RMSNorm
    before_mlp: RMSNorm
    multipliers: Multipliers

    @property
    def norms(self) -> Norms:
        return Norms(before_mixer=self.before, before_mlp=self.before_mlp)

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        row, rotation = self.before(x), rotations["rope"]
        attended, mixed = self.attention(row, step, rotation), self.mamba(row, step, rotation)
        x = _sum(x, attended, mixed, mx.array(self.multipliers.attention), mx.array(self.multipliers.mamba))
        return self.mlp(x, norm=self.before_mlp, onto=x)

    def as_native(self, builder: ProgramBuilder) -> None:
        """Add the instructions for the CPU kernels."""
        stream = builder.program.stream
        row = builder.normed(stream, self.before)
        for mixer, factor in ((self.attention, self.multipliers.attention), (self.mamba, self.multipliers.mamba)):
            sink = builder.sink(factor=factor)
            builder.mix(mixer, row, None, sink, "rope")
            sink.finish()
        builder.feed_forward(self.mlp, stream, self.before_mlp, builder.sink())

    def advance(self, stream: ResidualStream, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> ResidualStream:
        return ResidualStream(self(stream.sum(), step, rotations))


@fused
def _sum(x: mx.array, attended: mx.array, mixed: mx.array, first: mx.array, second: mx.array) -> mx.array:
    return (x + attended * first + mixed * second).astype(x.dtype)


def _gate(activation: str, before: float, after: float) -> Gate:
    act = elementwise(activation)
    return ScaledGate(act.__name__, before, after, fused(lambda gate, up: act(gate * before) * up * after))


def _mamba(reader: ConfigReader, sizes: Sizes) -> MambaSizes:
    count = reader.integer("mamba_n_heads", 128)
    inner = reader.optional_integer("mamba_d_ssm", 1024) or reader.integer("mamba_expand", 2) * sizes.hidden
    reader.skip("mamba_expand")
    dim = reader.take("mamba_d_head", "auto")
    found = MambaSizes(
        sizes.hidden,
        heads=count,
        dim=inner // count if dim == "auto" else reader.integer("mamba_d_head"),
        state=reader.integer("mamba_d_state", 256),
        groups=reader.integer("mamba_n_groups", 1),
        taps=reader.integer("mamba_d_conv", 4, low=2),
    )
    if found.heads % found.groups or found.inner != inner:
        raise reader.bad("mamba_n_heads", count, "a multiple of mamba_n_groups, and with mamba_d_head the width of mamba_d_ssm")
    check_step_limit(reader)
    return found


def _gains(reader: ConfigReader, mamba: MambaSizes) -> list[float]:
    """Return the multipliers of gate, heads, B, C and steps, each multiplied by the input's."""
    parts = _multiplier_list(reader, "ssm_multipliers", 5)
    sizes = [mamba.inner, mamba.inner, mamba.groups * mamba.state, mamba.groups * mamba.state, mamba.heads]
    read = reader.number("ssm_in_multiplier", 1.0)
    return [read * factor for factor, size in zip(parts, sizes, strict=True) for _ in range(size)]


def _multiplier_list(reader: ConfigReader, key: str, count: int) -> list[float]:
    values = reader.take(key)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count or not all(isinstance(v, (int, float)) for v in values):
        raise reader.bad(key, values, f"a list of {count} numbers")
    return [float(value) for value in values]


def _check_the_rest(reader: ConfigReader) -> None:
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        reader.only(key, False)
    reader.skip("mamba_chunk_size", "mamba_use_mlp", "num_logits_to_keep", "layer_types", "layers_block_type")
    reader.skip("mlp_expansion_factor", "attn_layer_indices", "time_step_min", "time_step_max", "time_step_floor")
    reader.finish()
