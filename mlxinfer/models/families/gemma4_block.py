"""The parts of a Gemma 4 block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from ...cache.base import AttentionParams, Rotation, Step
from ...nn.activations import Gate, gated
from ...nn.attention import Heads, load_output
from ...nn.linear import JoinedLinear, Linear
from ...nn.mlp import GatedMLP
from ...nn.moe import Experts, SoftmaxThenTop
from ...nn.norms import RMSNorm
from ...nn.residual_stream import Stream
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from ..block import Norms

if TYPE_CHECKING:
    from ...kernels_cpu import View
    from ..native.cpu_program import Accumulator, ProgramBuilder


@dataclass(frozen=True, slots=True)
class Gemma4Attention:
    """Attention with norms on queries, keys and values, whose scores are not scaled. Without a projection of keys it reads the pages of
    `layer`, which another block fills; without one of values, keys before their norm serve as values."""

    layer: int
    """Index in the cache of the layer whose pages it reads."""
    heads: Heads
    """Sizes."""
    inputs: JoinedLinear
    """Projects to queries, keys and values, as far as there are projections for them."""
    output: Linear
    """`[hidden, heads * dim]`."""
    norms: Sequence[RMSNorm]
    """The norm of query heads, and that of key heads if it has keys."""

    @classmethod
    def load(cls, weights: Weights, name: str, layer: int, heads: Heads, parts: Sequence[str], eps: float) -> Gemma4Attention:
        """Load the projections of these names."""
        sizes = heads.sizes[: len(parts)]
        inputs = JoinedLinear(
            [Linear.load(weights, f"{name}.{part}", size, heads.hidden) for part, size in zip(parts, sizes, strict=True)], sizes
        )
        norms = [RMSNorm.load(weights, f"{name}.{part[0]}_norm", heads.dim, eps) for part in parts[:2]]
        return cls(layer, heads, inputs, load_output(weights, name, heads), norms)

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        assert rotation is not None
        rows, heads, params = x.shape[0], self.heads, AttentionParams(1.0)
        flat, *kv = self.inputs(x, norm=norm)
        q = rotation(self.norms[0](flat.reshape(rows, heads.count, heads.dim)))
        if not kv:
            y = step.attend_again(self.layer, q, params)
        else:
            k, v = (part.reshape(rows, heads.kv, heads.dim) for part in (kv[0], kv[-1]))
            v = mx.fast.rms_norm(v, None, self.norms[0].eps)
            y = step.attend(self.layer, q, rotation(self.norms[1](k)), v, params)
        return self.output(y.reshape(rows, -1), onto=onto)

    def natively(self, builder: ProgramBuilder, x: View, norm: RMSNorm | None, sink: Accumulator, rope: str | None) -> None:
        """The same for the CPU kernels."""
        heads, program = self.heads, builder.program
        queries, *kv = builder.split(self.inputs, x, "projected", norm=norm)
        q_norm, width = builder.norm(self.norms[0]), heads.count * heads.dim
        if not kv:
            source = builder.reads(self.layer, rope)
            y = program.attend(queries, None, None, width, step=heads.dim, source=source, query_norm=q_norm, scale=1.0)
        else:
            builder.fills(self.layer, rope)
            k_norm, v_norm = builder.norm(self.norms[1]), (mx.ones((heads.dim,)), self.norms[0].eps)
            y = program.attend(
                queries, kv[0], kv[-1], width, step=heads.dim, query_norm=q_norm, key_norm=k_norm, value_norm=v_norm, scale=1.0
            )
        sink.product(self.output, y)


@dataclass(frozen=True, slots=True)
class ParallelExperts:
    """Experts that read the stream itself, next to the MLP; both results have a norm of their own before they are added."""

    router_norm: RMSNorm
    """The norm of what the router reads, with its scale."""
    router: Linear
    """`[experts, hidden]`."""
    gains: mx.array
    """Factor of each expert's weight, float32 `[experts]`."""
    experts: Experts
    """The experts to choose from."""
    chosen: int
    """How many of them each token takes."""
    norms: Sequence[RMSNorm]
    """After the MLP, before the experts, after the experts."""

    def __call__(self, x: mx.array, mlp: mx.array) -> mx.array:
        """The stream and the MLP's result, `[T, hidden]` both, to the sum of both results."""
        best, shares = SoftmaxThenTop(self.chosen, normalized=True)(self.router(self.router_norm(x)))
        shares = shares * self.gains[best]
        y = (self.experts(self.norms[1](x), best) * shares.astype(x.dtype)[..., None]).sum(axis=-2)
        return self.norms[0](mlp) + self.norms[2](y)

    def natively(self, builder: ProgramBuilder, x: View, mlp: View, sink: Accumulator) -> None:
        """The same for the CPU kernels: adds both results to the sink."""
        sink.normed(mlp, self.norms[0])
        router = replace(SoftmaxThenTop(self.chosen, normalized=True).router, gains=self.gains)
        choice = builder.program.choose(builder.product(self.router, builder.normed(x, self.router_norm), "logits"), router)
        y = builder.of_experts(self.experts, builder.normed(x, self.norms[1]), choice.experts)
        total = builder.program.view("total", y.count)
        builder.program.add(y, total, shares=choice.shares)
        sink.normed(total, self.norms[2])


@dataclass(frozen=True, slots=True)
class OwnInput:
    """Adds the layer's own input to the stream, as far as a gate lets it through."""

    gate: Linear
    """`[n, hidden]`."""
    act: Gate
    """The gated unit."""
    projection: Linear
    """`[hidden, n]`."""
    norm: RMSNorm
    """The norm of the result, weight `[hidden]`."""

    @classmethod
    def load(cls, weights: Weights, name: str, hidden: int, size: int, activation: str, eps: float) -> OwnInput:
        return cls(
            Linear.load(weights, f"{name}.per_layer_input_gate", size, hidden),
            gated(activation),
            Linear.load(weights, f"{name}.per_layer_projection", hidden, size),
            RMSNorm.load(weights, f"{name}.post_per_layer_input_norm", hidden, eps),
        )

    def __call__(self, x: mx.array, own: mx.array) -> mx.array:
        """`[T, hidden]` and `[T, n]` to `[T, hidden]`."""
        return self.norm(self.projection(self.act(self.gate(x), own)), onto=x)

    def natively(self, builder: ProgramBuilder, x: View) -> None:
        """The same for the CPU kernels."""
        gate = builder.product(self.gate, x, "gate of the own")
        builder.gate(self.act, gate, builder.own(gate.count), gate)
        sink = builder.sink(self.norm)
        sink.product(self.projection, gate)
        sink.finish()


@dataclass(frozen=True, slots=True)
class Gemma4Block:
    """Attention and MLP with norms before and after, experts next to the MLP, the layer's own input, and a factor of it all."""

    mixer: Gemma4Attention
    """Attention."""
    mlp: GatedMLP
    """The feed-forward layer."""
    four: Sequence[RMSNorm]
    """Before and after attention, before and after the MLP."""
    rope: str
    """Key of the block's rope in `Architecture.ropes`."""
    scale: mx.array
    """Factor of the block's result, `[1]`."""
    experts: ParallelExperts | None = None
    """The experts, if there are any."""
    own: OwnInput | None = None
    """Takes the layer's own input, if there is one."""

    @property
    def norms(self) -> Norms:
        return Norms(*self.four)

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        before, after, before_mlp, after_mlp = self.four
        x = after(self.mixer(x, step, rotations[self.rope], norm=before), onto=x)
        y = self.mlp(x, norm=before_mlp)
        x = after_mlp(y if self.experts is None else self.experts(x, y), onto=x)
        if self.own is not None and own is not None:
            x = self.own(x, own)
        return x * self.scale

    def as_native(self, builder: ProgramBuilder) -> None:
        """The same for the CPU kernels."""
        before, after, before_mlp, after_mlp = self.four
        stream = builder.program.stream
        sink = builder.sink(after)
        self.mixer.natively(builder, stream, before, sink, self.rope)
        sink.finish()
        sink = builder.sink(after_mlp)
        if self.experts is None:
            builder.feed_forward(self.mlp, stream, before_mlp, sink)
        else:
            self.experts.natively(builder, stream, builder.product(*builder.inner(self.mlp, stream, before_mlp), "of the MLP"), sink)
        sink.finish()
        if self.own is not None:
            self.own.natively(builder, stream)
        builder.program.add(stream, stream, factor=cast("float", self.scale.item()))

    def advance(self, stream: Stream, step: Step, rotations: Mapping[str, Rotation]) -> Stream:
        return Stream(self(stream.sum(), step, rotations))
