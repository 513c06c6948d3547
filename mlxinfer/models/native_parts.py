"""What the parts of a block are for the CPU kernels: instructions of a `kernels_cpu.Program`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import mlx.core as mx

from .. import kernels_cpu
from ..cache.base import HeadNorm
from ..kernels_cpu import Norm, Program, Projection, View
from ..nn.activations import Activated, ClampedSwiglu, Gate, relu_squared
from ..nn.attention import Attention, Temperature
from ..nn.gated_delta import GatedDelta, gated_by_silu
from ..nn.linear import JoinedLinear, Linear
from ..nn.mamba2 import Mamba2
from ..nn.mlp import GatedMLP, PlainMLP
from ..nn.moe import ExpertLinear, Experts, MixtureOfExperts, PlainExperts
from ..nn.norms import RMSNorm
from ..nn.short_conv import ShortConv


class NotNative(Exception):
    """A part that the CPU kernels cannot compute."""


@runtime_checkable
class Native(Protocol):
    """A part of one family's own that says what it is for the CPU kernels."""

    def natively(self, parts: Parts, x: View, norm: RMSNorm | None, sink: Sink, rope: str | None) -> None:
        """Adds `mix(norm(x))` to the sink. Raises `NotNative`."""
        ...


class Parts:
    """Turns parts into instructions. Every method raises `NotNative` for what the kernels cannot compute."""

    def __init__(self, hidden: int, dtype: mx.Dtype) -> None:
        """Rows `[T, hidden]` of `dtype`."""
        self.program = Program(hidden, dtype)
        self.layers: list[int] = []
        """Indices of the attention layers in the cache, in order."""
        self.ropes: list[str | None] = []
        """Keys of their ropes, None where they do not rotate."""
        self.temperatures: list[Temperature] = []
        """Those of attention layers: the CPU kernels know none."""
        self.recurrent: list[int] = []
        """Indices of the recurrent layers in the cache, in order."""

    def projection(self, linear: Linear) -> Projection:
        """A packed matrix whose results have the rows' dtype."""
        m, dtype = linear.matrix, self.program.dtype
        if type(linear) not in (Linear, ExpertLinear) or not isinstance(m, kernels_cpu.Packed):
            raise NotNative
        if dtype != mx.float32 and m.dtype is not None and m.dtype != dtype:
            raise NotNative
        return Projection(m, linear.bias)

    def norm(self, norm: RMSNorm | HeadNorm | None) -> Norm | None:
        """Weight and epsilon."""
        if norm is None:
            return None
        if getattr(norm, "centring", False):
            raise NotNative
        return norm.weight, norm.eps

    def product(self, linear: Linear, x: View, name: str, *, norm: RMSNorm | None = None, experts: View | None = None) -> View:
        """`linear(norm(x))`."""
        return self.program.multiply(x, self.projection(linear), name, norm=self.norm(norm), experts=experts)

    def split(self, joined: JoinedLinear, x: View, name: str, *, norm: RMSNorm | None = None, experts: View | None = None) -> list[View]:
        """The outputs of several projections."""
        found = []
        for i, (linear, cuts) in enumerate(zip(joined.linears, joined.splits, strict=True)):
            y = self.product(linear, x, f"{name} {i}", norm=norm, experts=experts)
            ends = [*cuts, y.count]
            found += [y.columns(start, end - start) for start, end in zip([0, *cuts], ends, strict=True)]
        return found

    def normed(self, x: View, norm: RMSNorm | None) -> View:
        """`norm(x)`, for what is read several times."""
        pair = self.norm(norm)
        return x if pair is None else self.program.norm(x, pair, "normed")

    def mix(self, mixer: object, x: View, norm: RMSNorm | None, sink: Sink, rope: str | None) -> None:
        """Adds `mixer(norm(x))` to the sink."""
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
        elif isinstance(mixer, Native):
            mixer.natively(self, x, norm, sink, rope)
        else:
            raise NotNative

    def attend(self, attention: Attention, queries: View, keys: View, values: View, rope: str | None, *, step: int = 0) -> View:
        """Attention alone; query heads begin `step` columns after one another, or without a gap."""
        if attention.query_gain is not None or (attention.rotates and rope is None):
            raise NotNative
        q_norm, k_norm = self.norm(attention.q_norm), self.norm(attention.k_norm)
        if attention.wide_norms and q_norm and k_norm:
            self.program.norm(queries, q_norm, to=queries)
            self.program.norm(keys, k_norm, to=keys)
            q_norm = k_norm = None
        self.layers.append(attention.layer)
        self.ropes.append(rope if attention.rotates else None)
        if attention.temperature is not None:
            self.temperatures.append(attention.temperature)
        params = attention.params
        return self.program.attend(
            queries,
            keys,
            values,
            attention.output.matrix.shape[-1],
            step=step or attention.heads.dim,
            query_norm=q_norm,
            key_norm=k_norm,
            sinks=params.sinks,
            scale=params.scale,
            softcap=params.softcap,
        )

    def feed_forward(self, mlp: object, x: View, norm: RMSNorm | None, sink: Sink) -> None:
        """Adds `mlp(norm(x))` to the sink."""
        if isinstance(mlp, MixtureOfExperts):
            self._mixture(mlp, x, norm, sink)
        else:
            down, inner = self._inner(mlp, x, norm)
            sink.product(down, inner)

    def _inner(self, mlp: object, x: View, norm: RMSNorm | None) -> tuple[Linear, View]:
        """The last projection of a feed-forward layer, and what it reads."""
        if type(mlp) is GatedMLP:
            return mlp.down, self._gated(mlp.gate_up, mlp.gate, x, norm=norm)
        if type(mlp) is PlainMLP:
            return mlp.down, self._activated(mlp.activation, self.product(mlp.up, x, "inner", norm=norm))
        raise NotNative

    def _gated(self, joined: JoinedLinear, gate: Gate, x: View, *, norm: RMSNorm | None = None, experts: View | None = None) -> View:
        first = joined.linears[0]
        if len(joined.linears) == 1 and isinstance(gate, Activated) and first.can_gate(gate.activation):
            projection = self.projection(first)
            return self.program.multiply(x, projection, "gated", norm=self.norm(norm), gate=gate.activation, experts=experts)
        clamped = gate if isinstance(gate, ClampedSwiglu) else None
        unit = "clamped_swiglu" if clamped else gate.activation if isinstance(gate, Activated) else ""
        if unit not in ("clamped_swiglu", "silu", "gelu_tanh"):
            raise NotNative
        gates, ups = self.split(joined, x, "inner", norm=norm, experts=experts)
        y = self.program.view("gated", ups.count, ups.each)
        alpha, limit = (clamped.alpha, clamped.limit) if clamped else (1.0, 0.0)
        self.program.gate(ups, gates, unit, y, alpha=alpha, limit=limit)
        return y

    def _activated(self, activation: Callable[[mx.array], mx.array], x: View) -> View:
        if activation is not relu_squared:
            raise NotNative
        self.program.gate(x, x, "relu_squared", x)
        return x

    def _mixture(self, mixture: MixtureOfExperts, x: View, norm: RMSNorm | None, sink: Sink) -> None:
        router = getattr(mixture.route, "router", None)
        if router is None:
            raise NotNative
        row = self.normed(x, norm)
        choice = self.program.choose(self.product(mixture.router, row, "logits"), router)
        read = row if mixture.narrowing is None else self.product(mixture.narrowing, row, "narrow")
        down, inner = self._expert(mixture.experts, read, choice.experts)
        y = self.product(down, inner, "of experts", experts=choice.experts)
        if mixture.widening is None:
            sink.rows(y, shares=choice.shares)
        else:
            total = self.program.view("total", y.count)
            self.program.add(y, total, shares=choice.shares)
            sink.product(mixture.widening, total)
        if mixture.shared is not None:
            gate = None if mixture.shared.gate is None else self.product(mixture.shared.gate, row, "gate of the shared")
            down, inner = self._inner(mixture.shared.mlp, row, None)
            if gate is None:
                sink.product(down, inner)
            else:
                sink.rows(self.product(down, inner, "of the shared"), gate=gate)

    def _expert(self, experts: Experts | PlainExperts, x: View, chosen: View) -> tuple[Linear, View]:
        if type(experts) is Experts:
            return experts.down, self._gated(experts.gate_up, experts.gate, x, experts=chosen)
        if type(experts) is PlainExperts:
            return experts.down, self._activated(experts.activation, self.product(experts.up, x, "inner", experts=chosen))
        raise NotNative

    def _delta(self, delta: GatedDelta, x: View, norm: RMSNorm | None, sink: Sink) -> None:
        s = delta.sizes
        if not isinstance(delta.inputs, JoinedLinear) or s.by_channel or delta.gate is not gated_by_silu:
            raise NotNative
        qkv, beta, decay, gate = self.split(delta.inputs, x, "projected", norm=norm)
        self.recurrent.append(delta.layer)
        sizes = s.key_heads, s.value_heads, s.key_dim, s.value_dim
        y = self.program.delta((qkv, beta, decay), sizes, delta.convolution, delta.decay, delta.decay_bias)
        sink.product(delta.output, self.program.gated_norm(y, gate, delta.norm, delta.eps, first=True, groups=s.value_heads))

    def _mamba(self, mamba: Mamba2, x: View, norm: RMSNorm | None, sink: Sink) -> None:
        if mamba.gains is not None:
            raise NotNative
        s = mamba.sizes
        projected = self.product(mamba.inputs, x, "projected 0", norm=norm)
        gate, mixed = projected.columns(0, s.inner), projected.columns(s.inner, s.channels)
        steps = projected.columns(s.inner + s.channels, s.heads)
        self.recurrent.append(mamba.layer)
        sizes, vectors = (s.heads, s.dim, s.state, s.groups), (mamba.decay, mamba.skip, mamba.step_bias)
        y = self.program.mamba((mixed, steps), sizes, mamba.convolution, mamba.bias, vectors, (s.least, s.most))
        normed = mamba.norm is not None
        out = self.program.gated_norm(y, gate, mamba.norm, mamba.eps, normed=normed, first=mamba.norm_first, groups=s.groups)
        sink.product(mamba.output, out)

    def _short_conv(self, conv: ShortConv, x: View, norm: RMSNorm | None, sink: Sink) -> None:
        projected = self.product(conv.inputs, x, "projected 0", norm=norm)
        width = projected.count // 3
        before, after, row = (projected.columns(i * width, width) for i in range(3))
        self.recurrent.append(conv.layer)
        sink.product(conv.output, self.program.short_convolution(before, after, row, conv.convolution, conv.bias))


class Sink:
    """Where results are added up: `stream += factor * after(sum of results)`."""

    def __init__(self, parts: Parts, after: RMSNorm | None = None, factor: float = 1.0) -> None:
        self._parts = parts
        self._after, self._factor = parts.norm(after), factor
        program = parts.program
        self._direct = self._after is None and factor == 1.0
        self._to = program.stream if self._direct else program.view("part", program.hidden)
        self._onto = program.stream if self._direct else None

    def product(self, linear: Linear, x: View) -> None:
        """Add `linear(x)`."""
        self._parts.program.multiply(x, self._parts.projection(linear), to=self._to, onto=self._onto)
        self._onto = self._to

    def rows(self, x: View, *, shares: View | None = None, gate: View | None = None) -> None:
        """Add rows; see `Program.add`."""
        self._parts.program.add(x, self._to, onto=self._onto, shares=shares, gate=gate)
        self._onto = self._to

    def finish(self) -> None:
        """All results are there."""
        program = self._parts.program
        if self._direct:
            return
        if self._after is not None:
            plain = self._factor == 1.0
            program.norm(self._to, self._after, to=program.stream if plain else self._to, onto=program.stream if plain else None)
            if plain:
                return
        program.add(self._to, program.stream, onto=program.stream, factor=self._factor)
