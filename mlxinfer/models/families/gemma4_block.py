"""Parts of a Gemma 4 block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from ...cache.base import AttentionParams, HeadSteps, Rotation, Step, ValueSteps
from ...nn.activations import Gate, gated
from ...nn.attention import Heads, load_output
from ...nn.linear import JoinedLinear, Linear
from ...nn.mlp import GatedMLP
from ...nn.moe import Experts
from ...nn.norms import RMSNorm
from ...nn.residual_stream import ResidualStream
from ...nn.routes import Route
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from ..block import Norms

if TYPE_CHECKING:
    from ...kernels_cpu import View
    from ..native.cpu_program import Accumulator, ProgramBuilder


_UNSCALED = AttentionParams(1.0)


@dataclass(frozen=True, slots=True)
class Gemma4Attention:
    """Attention with norms on queries, keys and values, and unscaled scores.

    Without a key projection it reads the pages of `layer`, which another block fills. Without a value projection, keys before their norm
    serve as values.
    """

    layer: int
    """Cache index of the layer whose pages are read."""
    heads: Heads
    inputs: JoinedLinear
    """Joined projections of queries and, if present, keys and values."""
    output: Linear
    """`[hidden, heads * dim]`."""
    norms: Sequence[RMSNorm]
    """Norm of query heads and, with keys, of key heads."""
    values: ValueSteps | None
    """Norm of value heads; None without keys."""

    @classmethod
    def load(cls, weights: Weights, name: str, layer: int, heads: Heads, parts: Sequence[str], eps: float) -> Gemma4Attention:
        """Load the projections named in `parts`."""
        sizes = heads.sizes[: len(parts)]
        inputs = JoinedLinear(
            [Linear.load(weights, f"{name}.{part}", size, heads.hidden) for part, size in zip(parts, sizes, strict=True)], sizes
        )
        norms = [RMSNorm.load(weights, f"{name}.{part[0]}_norm", heads.dim, eps) for part in parts[:2]]
        values = ValueSteps(eps, from_keys=len(parts) == 2) if len(parts) > 1 else None
        return cls(layer, heads, inputs, load_output(weights, name, heads), norms, values)

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """Map `[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        assert rotation is not None
        rows = self.inputs.runs(x, norm=norm)
        if self.values is None:
            y = step.attend_again(self.layer, rows[0], HeadSteps(self.norms[0], rotation=rotation), _UNSCALED)
        else:
            q_norm, k_norm = self.norms
            y = step.attend_rows(self.layer, rows, HeadSteps(q_norm, k_norm, rotation, values=self.values), _UNSCALED)
        return self.output(y, onto=onto)

    def natively(self, builder: ProgramBuilder, x: View, norm: RMSNorm | None, sink: Accumulator, rope: str | None) -> None:
        """Add the instructions for the CPU kernels."""
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
    """Experts that read the stream beside the MLP; each result has its own norm before the sum."""

    router_norm: RMSNorm
    """Norm of the router's input, with the router's scale."""
    router: Linear
    """`[experts, hidden]`."""
    route: Route
    experts: Experts
    norms: Sequence[RMSNorm]
    """Norms after the MLP, before the experts, and after the experts."""

    def __call__(self, x: mx.array, mlp: mx.array) -> mx.array:
        """Map the stream and the MLP's result, both `[T, hidden]`, to the sum of both results."""
        return self.beside(x, self.router_norm(x), mlp)

    def beside(self, x: mx.array, routed: mx.array, mlp: mx.array) -> mx.array:
        """Do the same with the router's norm of the stream, `routed` `[T, hidden]`."""
        best, shares = self.route(self.router(routed))
        y = self.experts.weighted(self.norms[1](x), best, shares)
        return ResidualStream(self.norms[0](mlp), y, self.norms[2]).sum()

    def natively(self, builder: ProgramBuilder, x: View, mlp: View, sink: Accumulator) -> None:
        """Add instructions for the CPU kernels that accumulate both results."""
        sink.normed(mlp, self.norms[0])
        choice = builder.program.choose(builder.product(self.router, builder.normed(x, self.router_norm), "logits"), self.route.router)
        y = builder.of_experts(self.experts, builder.normed(x, self.norms[1]), choice.experts)
        total = builder.program.view("total", y.count)
        builder.program.add(y, total, shares=choice.shares)
        sink.normed(total, self.norms[2])


@dataclass(frozen=True, slots=True)
class OwnInput:
    """Adds the gated per-layer input to the stream."""

    gate: Linear
    """`[n, hidden]`."""
    act: Gate
    projection: Linear
    """`[hidden, n]`."""
    norm: RMSNorm
    """Norm of the result, weight `[hidden]`."""

    @classmethod
    def load(cls, weights: Weights, name: str, hidden: int, size: int, activation: str, eps: float) -> OwnInput:
        return cls(
            Linear.load(weights, f"{name}.per_layer_input_gate", size, hidden),
            gated(activation),
            Linear.load(weights, f"{name}.per_layer_projection", hidden, size),
            RMSNorm.load(weights, f"{name}.post_per_layer_input_norm", hidden, eps),
        )

    def __call__(self, x: mx.array, own: mx.array) -> mx.array:
        """Map `[T, hidden]` and the input `[T, n]` to `[T, hidden]`."""
        return self.norm(self.projected(x, own), onto=x)

    def projected(self, x: mx.array, own: mx.array) -> mx.array:
        """Return what is added to the stream, before its norm."""
        return self.projection(self.act(self.gate(x), own))

    def natively(self, builder: ProgramBuilder, x: View) -> None:
        """Add the instructions for the CPU kernels."""
        gate = builder.product(self.gate, x, "gate of the own")
        builder.gate(self.act, gate, builder.own(gate.count), gate)
        sink = builder.sink(self.norm)
        sink.product(self.projection, gate)
        sink.finish()


@dataclass(frozen=True, slots=True)
class Gemma4Block:
    """Block of attention and MLP with norms before and after, optional experts and per-layer input, and a factor on the result."""

    mixer: Gemma4Attention
    mlp: GatedMLP
    four: Sequence[RMSNorm]
    """Norms before and after attention, before and after the MLP."""
    rope: str
    """Key of the block's rope in `Architecture.ropes`."""
    factor: float
    """Factor of the block's result."""
    experts: ParallelExperts | None = None
    own: OwnInput | None = None

    @property
    def norms(self) -> Norms:
        return Norms(*self.four, adds_alone=self.own is not None or self.experts is not None)

    def __call__(self, x: mx.array, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> mx.array:
        before, after, before_mlp, after_mlp = self.four
        x = after(self.mixer(x, step, rotations[self.rope], norm=before), onto=x)
        y = self.mlp(x, norm=before_mlp)
        x = after_mlp(y if self.experts is None else self.experts(x, y), onto=x)
        if self.own is not None and own is not None:
            x = self.own(x, own)
        return x * self.factor

    def as_native(self, builder: ProgramBuilder) -> None:
        """Add the instructions for the CPU kernels."""
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
        builder.program.add(stream, stream, factor=self.factor)

    def advance(self, stream: ResidualStream, step: Step, rotations: Mapping[str, Rotation], own: mx.array | None = None) -> ResidualStream:
        before, after, before_mlp, after_mlp = self.four
        x, row = stream.normed(before)
        stream = ResidualStream(x, self.mixer(row, step, rotations[self.rope]), after)
        if self.experts is None:
            x, row = stream.normed(before_mlp)
            y = self.mlp(row)
        else:  # The experts' path is longer than the MLP's, so that the router's norm is computed with the sum.
            x, row = stream.normed(self.experts.router_norm)
            y = self.experts.beside(x, row, self.mlp(before_mlp(x)))
        if self.own is None or own is None:
            return ResidualStream(x, y, after_mlp, gain=self.factor)
        x = ResidualStream(x, y, after_mlp).sum()
        return ResidualStream(x, self.own.projected(x, own), self.own.norm, gain=self.factor)
