"""Rows of a step on their way into open pages, and what float64 makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.kernels_metal.append_rows.launcher import Norm, RowPart, append_rows
from mlxinfer.kernels_metal.append_rows.plan import AppendPlan, NewRows, Spans, longest, plan_append
from mlxinfer.kernels_metal.append_rows.reference import appended
from mlxinfer.kernels_metal.paged_attention.tiles import Shape

from .sealed_pages import Array, to_float


@dataclass(frozen=True)
class AppendScene:
    """`sequences` are (slot, new rows, where in the page these begin); `old` are the recent rows before."""

    sequences: tuple[tuple[int, int, int], ...]
    old: Spans = ()
    dim: int = 64
    value_dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    dtype: mx.Dtype = mx.float32
    norms: str = ""
    biased: bool = False
    dims: int = 0
    joined: bool = True
    value_eps: float | None = None
    values_are_keys: bool = False
    seed: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(self.dtype, self.heads, self.kv_heads, self.dim, self.value_dim, 16, 16)

    @property
    def rows(self) -> int:
        return sum(count for _, count, _ in self.sequences)

    @cached_property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @cached_property
    def plan(self) -> AppendPlan:
        new, start = [], 0
        for slot, count, at in self.sequences:
            new.append(NewRows(slot, start, count, at))
            start += count
        plan = plan_append(self.old, new, rows=start)
        assert plan is not None
        return plan

    @cached_property
    def heads_of(self) -> list[Array]:
        """Queries, keys and values `[rows, heads, D]`, rounded to the dtype."""
        counts = ((self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.value_dim))
        found = [to_float(self._cast(3 * self.random.normal(size=(self.rows, *shape)))) for shape in counts]
        return [*found[:2], found[1]] if self.values_are_keys else found

    @cached_property
    def bias(self) -> mx.array | None:
        sizes = self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.value_dim
        return self._cast(self.random.normal(size=sum(sizes))) if self.biased else None

    @cached_property
    def biased_heads(self) -> list[Array]:
        """`heads_of` with their bias, rounded to the dtype."""
        if self.bias is None:
            return self.heads_of
        ends = np.cumsum([x.shape[1] * x.shape[2] for x in self.heads_of])[:-1]
        pairs = zip(self.heads_of, np.split(to_float(self.bias), ends), strict=True)
        return [to_float(self._cast(x + bias.reshape(x.shape[1:]))) for x, bias in pairs]

    @cached_property
    def parts(self) -> tuple[RowPart, RowPart, RowPart]:
        """All three in one array, or keys and values in one."""
        flat = [x.reshape(self.rows, -1) for x in self.heads_of]
        if self.values_are_keys:
            whole = self._cast(np.concatenate(flat[:2], axis=1))
            return RowPart(whole, 0), *[RowPart(whole, flat[0].shape[1])] * 2
        if not self.joined:
            both = self._cast(np.concatenate(flat[1:], axis=1))
            return RowPart(self._cast(flat[0]), 0), RowPart(both, 0), RowPart(both, flat[1].shape[1])
        whole = self._cast(np.concatenate(flat, axis=1))
        return RowPart(whole, 0), RowPart(whole, flat[0].shape[1]), RowPart(whole, flat[0].shape[1] + flat[1].shape[1])

    @cached_property
    def old_rows(self) -> list[mx.array]:
        """NaN for an empty place."""
        if not self.old:
            return []
        arrays = []
        for dim in (self.dim, self.value_dim):
            x = np.full((len(self.old), self.kv_heads, longest(self.old), dim), np.nan)
            for entry, (_, start, stop) in enumerate(self.old):
                x[entry, :, : stop - start] = self.random.normal(size=(self.kv_heads, stop - start, dim))
            arrays.append(self._cast(x))
        return arrays

    @cached_property
    def norm_weights(self) -> tuple[Norm | None, Norm | None]:
        return self._norm("q"), self._norm("k")

    def _norm(self, which: str) -> Norm | None:
        return Norm(self._cast(1 + self.random.normal(size=self.dim)), 1e-5) if which in self.norms else None

    @cached_property
    def waves(self) -> mx.array | None:
        if not self.dims:
            return None
        angles = self.random.uniform(0, 1e4, size=(self.rows, self.dims // 2))
        return mx.array(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))

    def _cast(self, x: Array) -> mx.array:
        return mx.array(x.astype(np.float32)).astype(self.dtype)

    @property
    def steps(self) -> dict[str, Any]:
        """What launchers are told about heads."""
        q_norm, k_norm = self.norm_weights
        return {"bias": self.bias, "q_norm": q_norm, "k_norm": k_norm, "waves": self.waves, "value_eps": self.value_eps}

    def run(self) -> list[mx.array]:
        """Queries, recent keys, recent values."""
        q, recent = append_rows(self.parts, self.old_rows, self.plan, self.shape, **self.steps)
        return [q, *recent]

    def plain(self) -> list[mx.array]:
        """The same by the reference in plain MLX."""
        q, recent = appended(self.parts, self.old_rows, self.plan, self.shape, **self.steps)
        return [q, *recent]

    def expected(self) -> list[Array]:
        """In float64."""
        q, k, v = (x.astype(np.float64) for x in self.biased_heads)
        q, k = (self._turned(x, norm) for x, norm in zip((q, k), self.norm_weights, strict=True))
        if self.value_eps is not None:
            v = v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + self.value_eps)
        recent = []
        for x, old in zip((k, v), self.old_rows or [None, None], strict=True):
            entries = np.zeros((len(self.plan.new), self.kv_heads, self.plan.length, x.shape[-1]))
            done = 0
            for entry, (slot, start, stop) in enumerate(self.plan.new):
                before = {s: (i, a, b) for i, (s, a, b) in enumerate(self.old)}.get(slot)
                if before and old is not None:
                    last = min(before[2], stop)
                    entries[entry, :, : last - start] = to_float(old)[before[0], :, start - before[1] : last - before[1]]
                count = next((count for s, count, _ in self.sequences if s == slot), 0)
                entries[entry, :, stop - start - count : stop - start] = np.swapaxes(x[done : done + count], 0, 1)
                done += count
            recent.append(entries)
        return [q, *recent]

    def _turned(self, x: Array, norm: Norm | None) -> Array:
        if norm is not None:
            x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + norm.eps) * to_float(norm.weight)
        if self.waves is None:
            return x
        half = self.dims // 2
        wave = np.array(self.waves).astype(np.float64)
        turned = (x[..., :half] + 1j * x[..., half : self.dims]) * (wave[:, :1] + 1j * wave[:, 1:])
        return np.concatenate([turned.real, turned.imag, x[..., self.dims :]], axis=-1)
