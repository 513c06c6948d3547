"""Builds programs of the CPU kernels from the parts of blocks (`kernels_cpu.Program`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import mlx.core as mx

from ... import kernels_cpu
from ...cache.base import HeadNorm
from ...kernels_cpu import Norm, Program, ProgramProjection, View
from ...nn.activations import Activated, ClampedSwiglu, Gate, ScaledGate, relu_squared
from ...nn.attention import Attention, Temperature
from ...nn.gated_delta import GatedDelta, NarrowInputs, gated_by_sigmoid, gated_by_silu
from ...nn.latent_attention import LatentAttention
from ...nn.linear import JoinedLinear, Linear
from ...nn.mamba2 import Mamba2
from ...nn.mlp import GatedMLP, PlainMLP
from ...nn.moe import ExpertLinear, Experts, MixtureOfExperts, PlainExperts
from ...nn.norms import RMSNorm
from ...nn.short_conv import ShortConv


class NotNative(Exception):
    """The CPU kernels do not support a part."""


class PagesElsewhere(NotNative):
    """A part reads pages that another run of blocks fills."""


@runtime_checkable
class NativePart(Protocol):
    """A family's part that adds its own instructions for the CPU kernels."""

    def natively(self, builder: ProgramBuilder, x: View, norm: RMSNorm | None, sink: Accumulator, rope: str | None) -> None:
        """Add `mix(norm(x))` to the accumulator. Raises `NotNative`."""
        ...


class ProgramBuilder:
    """Builds a program from parts of blocks. Every method raises `NotNative` for unsupported parts."""

    def __init__(self, hidden: int, dtype: mx.Dtype, blocks: int = 1) -> None:
        """Create a program for rows `[T, hidden]` of `dtype`, for some of `blocks` blocks."""
        self.blocks = blocks
        self.block = 0
        """Index of the next block."""
        self.program = Program(hidden, dtype)
        self.layers: list[int] = []
        """Cache indices of the attention layers, in order."""
        self.ropes: list[str | None] = []
        """Rope key of each attention layer; None without rotation."""
        self.temperatures: list[Temperature] = []
        """Temperatures of the attention layers, which the CPU kernels do not support."""
        self.recurrent: list[int] = []
        """Cache indices of the recurrent layers, in order."""

    def mark(self) -> tuple[int, ...]:
        """Return the present length, for `back`."""
        return tuple(map(len, self._lists))

    def back(self, mark: tuple[int, ...]) -> None:
        """Drop instructions added after the mark."""
        for each, length in zip(self._lists, mark, strict=True):
            del each[length:]

    def check(self, mark: tuple[int, ...]) -> None:
        """Check instructions added after the mark. Raises ValueError."""
        reads = len(set(self.layers)) < len(self.layers)  # then instructions refer to earlier layers
        self.program.finish(0 if reads else mark[0])

    @property
    def _lists(self) -> list[list[Any]]:
        return [self.program.instructions, self.layers, self.ropes, self.temperatures, self.recurrent]

    def projection(self, linear: Linear) -> ProgramProjection:
        """Return a packed matrix whose results have the rows' dtype."""
        m, dtype = linear.matrix, self.program.dtype
        if type(linear) not in (Linear, ExpertLinear) or not isinstance(m, kernels_cpu.Packed):
            raise NotNative
        if dtype != mx.float32 and m.dtype is not None and m.dtype != dtype:
            raise NotNative
        return ProgramProjection(m, linear.bias, isinstance(linear, ExpertLinear) and linear.in_pool)

    def norm(self, norm: RMSNorm | HeadNorm | None) -> Norm | None:
        """Return (weight, epsilon) of a norm, or None."""
        if norm is None:
            return None
        if getattr(norm, "centring", False):
            raise NotNative
        return norm.weight, norm.eps

    def own(self, width: int) -> View:
        """Return the view of the block's per-layer input."""
        return self.program.given(self.blocks * width).columns(self.block * width, width)

    def product(self, linear: Linear, x: View, name: str, *, norm: RMSNorm | None = None, experts: View | None = None) -> View:
        """Add `linear(norm(x))` and return its view."""
        return self.program.multiply(x, self.projection(linear), name, norm=self.norm(norm), experts=experts)

    def split(self, joined: JoinedLinear, x: View, name: str, *, norm: RMSNorm | None = None, experts: View | None = None) -> list[View]:
        """Add a joined projection and return the views of its outputs."""
        found = []
        for i, (linear, cuts) in enumerate(zip(joined.linears, joined.splits, strict=True)):
            y = self.product(linear, x, f"{name} {i}", norm=norm, experts=experts)
            ends = [*cuts, y.count]
            found += [y.columns(start, end - start) for start, end in zip([0, *cuts], ends, strict=True)]
        return found

    def normed(self, x: View, norm: RMSNorm | None) -> View:
        """Add `norm(x)` for several readers and return its view."""
        return x if norm is None else self.program.norm(x, (norm.weight, norm.eps), "normed", centring=norm.centring)

    def scale(self, x: View, gains: mx.array) -> None:
        """Multiply columns in place by constants `[columns]`, with one instruction per run of equal constants."""
        values = cast("list[float]", gains.tolist())
        starts = [i for i, value in enumerate(values) if not i or value != values[i - 1]]
        for start, end in zip(starts, [*starts[1:], len(values)], strict=True):
            if values[start] != 1.0:
                part = x.columns(start, end - start)
                self.program.add(part, part, factor=values[start])

    def mix(self, mixer: object, x: View, norm: RMSNorm | None, sink: Accumulator, rope: str | None) -> None:
        """Add `mixer(norm(x))` to the accumulator."""
        if type(mixer) is Attention:
            queries, keys, values = self.split(mixer.qkv, x, "projected", norm=norm)
            answers = self.attend(mixer, queries, keys, values, rope)
            sink.product(mixer.output, answers)
        elif isinstance(mixer, GatedDelta):
            self._delta(mixer, x, norm, sink)
        elif isinstance(mixer, Mamba2):
            self._mamba(mixer, x, norm, sink)
        elif isinstance(mixer, ShortConv):
            self._short_conv(mixer, x, norm, sink)
        elif isinstance(mixer, LatentAttention):
            _add_latent(mixer, self, x, norm, sink, rope)
        elif isinstance(mixer, NativePart):
            mixer.natively(self, x, norm, sink, rope)
        else:
            raise NotNative

    def attend(self, attention: Attention, queries: View, keys: View, values: View, rope: str | None, *, step: int = 0) -> View:
        """Add attention and return its view. Query heads are `step` columns apart; 0 means contiguous."""
        if attention.rotates and rope is None:
            raise NotNative
        q_norm, k_norm = self.norm(attention.q_norm), self.norm(attention.k_norm)
        if attention.wide_norms and q_norm and k_norm:
            self.program.norm(queries, q_norm, to=queries)
            self.program.norm(keys, k_norm, to=keys)
            q_norm = k_norm = None
        self.fills(attention.layer, rope if attention.rotates else None, attention.temperature)
        params = attention.params
        return self.program.attend(
            queries,
            keys,
            values,
            attention.output.matrix.shape[-1],
            step=step or attention.heads.dim,
            query_norm=q_norm,
            key_norm=k_norm,
            query_gain=attention.query_gain,
            sinks=params.sinks,
            scale=params.scale,
            softcap=params.softcap,
        )

    def fills(self, layer: int, rope: str | None, temperature: Temperature | None = None) -> None:
        """Declare that the next attention fills this cache layer, rotated by `rope`."""
        self.layers.append(layer)
        self.ropes.append(rope)
        if temperature is not None:
            self.temperatures.append(temperature)

    def reads(self, layer: int, rope: str | None) -> int:
        """Declare that the next attention reads a layer filled earlier. Returns that layer's number."""
        if layer not in self.layers:
            raise PagesElsewhere
        self.fills(layer, rope)
        return self.layers.index(layer)

    def sink(self, after: RMSNorm | None = None, factor: float = 1.0) -> Accumulator:
        """Return an accumulator of results for the stream."""
        return Accumulator(self, after, factor)

    def feed_forward(self, mlp: object, x: View, norm: RMSNorm | None, sink: Accumulator) -> None:
        """Add `mlp(norm(x))` to the accumulator."""
        if isinstance(mlp, MixtureOfExperts):
            self._mixture(mlp, x, norm, sink)
        elif type(mlp) is GatedMLP and isinstance(mlp.gate, ScaledGate):
            inner = self._gated(mlp.gate_up, replace(mlp.gate, after=1.0), x, norm=norm)
            sink.product(mlp.down, inner, factor=mlp.gate.after)
        else:
            down, inner = self.inner(mlp, x, norm)
            sink.product(down, inner)

    def inner(self, mlp: object, x: View, norm: RMSNorm | None) -> tuple[Linear, View]:
        """Return (last projection of a feed-forward layer, its input)."""
        if type(mlp) is GatedMLP:
            return mlp.down, self._gated(mlp.gate_up, mlp.gate, x, norm=norm)
        if type(mlp) is PlainMLP:
            return mlp.down, self._activated(mlp.activation, self.product(mlp.up, x, "inner", norm=norm))
        raise NotNative

    def _gated(
        self,
        joined: JoinedLinear,
        gate: Gate,
        x: View,
        *,
        norm: RMSNorm | None = None,
        experts: View | None = None,
        pooled: bool = False,
    ) -> View:
        first = joined.linears[0]
        if len(joined.linears) == 1 and isinstance(gate, Activated) and first.can_gate(gate.activation):
            projection = self.projection(first)
            return self.program.multiply(x, projection, "gated", norm=self.norm(norm), gate=gate.activation, experts=experts)
        gates, ups = self.split(joined, x, "inner", norm=norm, experts=experts)
        y = self.program.view("gated", ups.count, ups.each)
        self.gate(gate, gates, ups, y, experts=experts if pooled else None)
        return y

    def gate(self, gate: Gate, gates: View, ups: View, to: View, *, experts: View | None = None) -> None:
        """Add `gate(gates, ups)`, except for rows with a negative number in `experts`. Raises `NotNative`, also for a `ScaledGate` with a
        last factor."""
        known = isinstance(gate, (Activated, ScaledGate)) and gate.activation in ("silu", "gelu_tanh")
        if isinstance(gate, ClampedSwiglu):
            self.program.gate(ups, gates, "clamped_swiglu", to, alpha=gate.alpha, limit=gate.limit, experts=experts)
        elif known and isinstance(gate, Activated):
            self.program.gate(ups, gates, gate.activation, to, experts=experts)
        elif known and isinstance(gate, ScaledGate) and gate.after == 1.0:
            self.program.gate(ups, gates, gate.activation, to, alpha=gate.before, experts=experts)
        else:
            raise NotNative

    def _activated(self, activation: Callable[[mx.array], mx.array], x: View, experts: View | None = None) -> View:
        if activation is not relu_squared:
            raise NotNative
        self.program.gate(x, x, "relu_squared", x, experts=experts)
        return x

    def _mixture(self, mixture: MixtureOfExperts, x: View, norm: RMSNorm | None, sink: Accumulator) -> None:
        row = self.normed(x, norm)
        choice = self.program.choose(self.product(mixture.router, row, "logits"), mixture.route.router)
        read = row if mixture.narrowing is None else self.product(mixture.narrowing, row, "narrow")
        y = self.of_experts(mixture.experts, read, choice.experts)
        if mixture.widening is None:
            sink.rows(y, shares=choice.shares)
        else:
            total = self.program.view("total", y.count)
            self.program.add(y, total, shares=choice.shares)
            sink.product(mixture.widening, total)
        if mixture.shared is not None:
            gate = None if mixture.shared.gate is None else self.product(mixture.shared.gate, row, "gate of the shared")
            down, inner = self.inner(mixture.shared.mlp, row, None)
            if gate is None:
                sink.product(down, inner)
            else:
                sink.rows(self.product(down, inner, "of the shared"), gate=gate)

    def of_experts(self, experts: Experts | PlainExperts, x: View, chosen: View) -> View:
        """Return a row from each of the chosen experts."""
        pool, store = experts.slots.pool, experts.slots.store
        if pool is None or store is None:
            down, inner = self._expert(experts, x, chosen)
            return self.product(down, inner, "of experts", experts=chosen)
        if not kernels_cpu.can_run_waves():
            raise NotNative
        from ...expert_offload.waves import NextWave  # few models need it

        with self.program.waves(chosen, NextWave(store, pool, chosen.each)) as slots:
            down, inner = self._expert(experts, x, slots, pooled=True)
            return self.product(down, inner, "of experts", experts=slots)

    def _expert(self, experts: Experts | PlainExperts, x: View, chosen: View, *, pooled: bool = False) -> tuple[Linear, View]:
        """Return (last projection, its input). `pooled`: some of `chosen` may be negative."""
        if type(experts) is Experts:
            return experts.down, self._gated(experts.gate_up, experts.gate, x, experts=chosen, pooled=pooled)
        if type(experts) is PlainExperts:
            inner = self.product(experts.up, x, "inner", experts=chosen)
            return experts.down, self._activated(experts.activation, inner, experts=chosen if pooled else None)
        raise NotNative

    def _delta(self, delta: GatedDelta, x: View, norm: RMSNorm | None, sink: Accumulator) -> None:
        s, units = delta.sizes, {gated_by_silu: "silu", gated_by_sigmoid: "sigmoid"}
        if delta.gate not in units:
            raise NotNative
        qkv, beta, decay, gate = self._delta_inputs(delta, x, norm)
        self.recurrent.append(delta.layer)
        sizes = s.key_heads, s.value_heads, s.key_dim, s.value_dim
        y = self.program.delta((qkv, beta, decay), sizes, delta.convolution, delta.decay, delta.decay_bias)
        unit = units[delta.gate]
        sink.product(delta.output, self.program.gated_norm(y, gate, delta.norm, delta.eps, first=True, unit=unit, groups=s.value_heads))

    def _delta_inputs(self, delta: GatedDelta, x: View, norm: RMSNorm | None) -> list[View]:
        """Return views of the joined queries, keys and values, of beta, decay and gate."""
        inputs = delta.inputs
        if isinstance(inputs, JoinedLinear):
            return self.split(inputs, x, "projected", norm=norm)
        if not isinstance(inputs, NarrowInputs) or len(inputs.wide.linears) != 1:
            raise NotNative
        q, _, _, beta, decay, gate = self.split(inputs.wide, x, "projected", norm=norm)
        qkv = View(q.buffer, q.width, q.first, delta.sizes.channels)
        return [qkv, beta, self.product(inputs.decay, decay, "decay"), self.product(inputs.gate, gate, "gate")]

    def _mamba(self, mamba: Mamba2, x: View, norm: RMSNorm | None, sink: Accumulator) -> None:
        s = mamba.sizes
        projected = self.product(mamba.inputs, x, "projected 0", norm=norm)
        if mamba.gains is not None:
            self.scale(projected, mamba.gains)
        gate, mixed = projected.columns(0, s.inner), projected.columns(s.inner, s.channels)
        steps = projected.columns(s.inner + s.channels, s.heads)
        self.recurrent.append(mamba.layer)
        sizes, vectors = (s.heads, s.dim, s.state, s.groups), (mamba.decay, mamba.skip, mamba.step_bias)
        y = self.program.mamba((mixed, steps), sizes, mamba.convolution, mamba.bias, vectors, (s.least, s.most))
        normed = mamba.norm is not None
        out = self.program.gated_norm(y, gate, mamba.norm, mamba.eps, normed=normed, first=mamba.norm_first, groups=s.groups)
        sink.product(mamba.output, out)

    def _short_conv(self, conv: ShortConv, x: View, norm: RMSNorm | None, sink: Accumulator) -> None:
        projected = self.product(conv.inputs, x, "projected 0", norm=norm)
        width = projected.count // 3
        before, after, row = (projected.columns(i * width, width) for i in range(3))
        self.recurrent.append(conv.layer)
        sink.product(conv.output, self.program.short_convolution(before, after, row, conv.convolution, conv.bias))


class Accumulator:
    """Accumulates results: `stream += factor * after(sum of results)`."""

    def __init__(self, builder: ProgramBuilder, after: RMSNorm | None = None, factor: float = 1.0) -> None:
        self._builder = builder
        self._after, self._factor = builder.norm(after), factor
        program = builder.program
        self._direct = self._after is None and factor == 1.0
        self._to = program.stream if self._direct else program.view("part", program.hidden)
        self._onto = program.stream if self._direct else None

    def product(self, linear: Linear, x: View, factor: float = 1.0) -> None:
        """Add `factor * linear(x)`."""
        if factor == 1.0:
            self._builder.program.multiply(x, self._builder.projection(linear), to=self._to, onto=self._onto)
        else:
            self._builder.program.add(self._builder.product(linear, x, "scaled"), self._to, onto=self._onto, factor=factor)
        self._onto = self._to

    def rows(self, x: View, *, shares: View | None = None, gate: View | None = None) -> None:
        """Add rows; see `Program.add`."""
        self._builder.program.add(x, self._to, onto=self._onto, shares=shares, gate=gate)
        self._onto = self._to

    def normed(self, x: View, norm: RMSNorm) -> None:
        """Add `norm(x)`."""
        pair = self._builder.norm(norm)
        assert pair is not None
        self._builder.program.norm(x, pair, to=self._to, onto=self._onto)
        self._onto = self._to

    def finish(self) -> None:
        """Add the accumulated results to the stream."""
        program = self._builder.program
        if self._direct:
            return
        if self._after is not None:
            plain = self._factor == 1.0
            program.norm(self._to, self._after, to=program.stream if plain else self._to, onto=program.stream if plain else None)
            if plain:
                return
        program.add(self._to, program.stream, onto=program.stream, factor=self._factor)


def _add_latent(
    latent: LatentAttention, builder: ProgramBuilder, x: View, norm: RMSNorm | None, sink: Accumulator, rope: str | None
) -> None:
    """Add `latent(norm(x))` to the accumulator. A key is the latent vector without rotation and the rotated channels; its value is the
    latent vector. Raises `NotNative`."""
    s, row = latent.sizes, builder.normed(x, norm)
    queries, keys = _latent_queries(latent, builder, row), builder.product(latent.keys, row, "latent")
    turned, pair = queries.columns(s.plain, queries.count - s.plain), builder.norm(latent.norm)
    into = builder.product(latent.into, _by_head(queries, s.heads, s.plain, s.plain + s.turned), "latent queries")
    builder.fills(latent.layer, rope, latent.temperature)
    answers = builder.program.attend(
        _heads_joined(into),
        keys,
        keys.columns(0, s.latent),
        s.heads * s.latent,
        step=s.latent,
        still=s.latent,
        turned=turned,
        turned_step=s.plain + s.turned,
        key_norm=pair,
        value_norm=pair,
        query_gain=None if latent.gain == 1.0 else mx.array([1.0] * s.latent + [latent.gain] * s.turned),
        scale=latent.scale,
    )
    values = builder.product(latent.out, _by_head(answers, s.heads, s.latent, s.latent), "values")
    sink.product(latent.output, _heads_joined(values))


def _latent_queries(latent: LatentAttention, builder: ProgramBuilder, row: View) -> View:
    if latent.narrow is None:
        return builder.product(latent.queries, row, "queries")
    narrow, norm = latent.narrow
    return builder.product(latent.queries, builder.product(narrow, row, "narrow queries"), "queries", norm=norm)


def _by_head(x: View, heads: int, count: int, step: int) -> View:
    """Return a view with one row per head: the first `count` columns of each head, `step` columns apart."""
    return View(x.buffer, step, 0, count, heads)


def _heads_joined(x: View) -> View:
    """Return a view that joins the rows of all heads."""
    return View(x.buffer, x.each * x.width, 0, x.each * x.width)
