"""Steps whose rows are appended and attended to in one launch, in two, and in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.kernels_metal.append_rows.launcher import append_rows
from mlxinfer.kernels_metal.formats import v_group
from mlxinfer.kernels_metal.paged_attention.launcher import paged_attention_append, paged_attention_decode
from mlxinfer.kernels_metal.paged_attention.plan import DecodePlan, Pools, SegmentRows, plan_decode
from mlxinfer.kernels_metal.paged_attention.tiles import Shape

from .append_scenes import AppendScene
from .sealed_pages import Array, seal_keys, seal_values, to_float
from .softmax import softmax


@dataclass(frozen=True)
class AppendedAttention:
    """`append` says what is new; each of its sequences has `sealed` full pages before its open one."""

    append: AppendScene
    sealed: tuple[int, ...]
    bits: tuple[int, int] = (16, 16)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    cores: int = 10

    @property
    def shape(self) -> Shape:
        s = self.append.shape
        return Shape(s.dtype, s.heads, s.kv_heads, s.key_dim, s.value_dim, *self.bits)

    @cached_property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.append.seed + 1)

    def _numbers(self, *shape: int) -> Array:
        return to_float(mx.array(self.random.normal(size=shape).astype(np.float32)).astype(self.shape.dtype))

    @cached_property
    def pools(self) -> Pools:
        slots = 1 + max(slot for slot, _, _ in (*self.append.sequences, *self.append.old))
        return Pools(sum(self.sealed) + 1, 0, slots, len(self.append.plan.new), self.append.plan.length)

    @cached_property
    def pages(self) -> tuple[list[mx.array], list[Array]]:
        """Sealed keys and values as the kernel reads them, and the numbers that they mean, `[Hkv, pages, 64, D]`."""
        s, arrays, meant = self.shape, [], []
        for which, (dim, bits) in enumerate(((s.key_dim, s.k_bits), (s.value_dim, s.v_bits))):
            x = self._numbers(s.kv_heads, self.pools.pages, 64, dim)
            if bits == 16:
                arrays.append(mx.array(np.ascontiguousarray(x if which else np.swapaxes(x, -1, -2))).astype(s.dtype))
                meant.append(x.astype(np.float64))
            else:
                codes, numbers = seal_values(x, bits, v_group(dim)) if which else seal_keys(x, bits)
                arrays += [mx.array(a) for a in codes]
                meant.append(numbers)
        return arrays, meant

    @cached_property
    def opened(self) -> list[mx.array]:
        """Open pages, NaN where rows lie apart from them or are not there yet."""
        s = self.shape
        made = [self._numbers(self.pools.slots, s.kv_heads, 64, dim) for dim in (s.key_dim, s.value_dim)]
        for slot, start, _ in self.append.plan.new:
            for x in made:
                x[slot, :, start:] = np.nan
        return [mx.array(x).astype(s.dtype) for x in made]

    @cached_property
    def rows(self) -> list[SegmentRows]:
        rows, start, page = [], 0, 0
        for i, ((slot, count, at), sealed) in enumerate(zip(self.append.sequences, self.sealed, strict=True)):
            kept = self.append.plan.new[i][1]
            past = 64 * sealed + at
            gone = 0 if self.window is None else max(0, past - self.window + 1) // 64
            rows.append(SegmentRows(slot, start, count, past, list(range(page + gone, page + sealed)), gone, kept, i))
            start, page = start + count, page + sealed
        return rows

    @cached_property
    def plan(self) -> DecodePlan:
        rows = self.append.rows
        return plan_decode(self.shape, self.rows, self.pools, query_rows=rows, window=self.window, cores=self.cores)

    @cached_property
    def sink_logits(self) -> mx.array | None:
        return mx.array(self._numbers(self.shape.heads)) if self.sinks else None

    @property
    def _how(self) -> dict[str, Any]:
        return {"scale": self.shape.key_dim**-0.5, "softcap": self.softcap, "sinks": self.sink_logits}

    def run(self) -> list[mx.array]:
        """Answers, and recent keys and values, by one launch."""
        a, pages = self.append, (self.pages[0], [], self.opened)
        y, recent = paged_attention_append(a.parts, a.old_rows, a.plan, *pages, self.plan, **a.steps, **self._how)
        return [y, *recent]

    def in_two_launches(self) -> list[mx.array]:
        a, pages = self.append, (self.pages[0], [], self.opened)
        q, recent = append_rows(a.parts, a.old_rows, a.plan, self.shape, **a.steps)
        return [paged_attention_decode(q, *pages, self.plan, recent=recent, **self._how), *recent]

    def again(self, recent: list[mx.array]) -> mx.array:
        """Answers to the same raw queries, from recent rows that have the step's own among them."""
        a, part, size = self.append, self.append.parts[0], self.shape.heads * self.shape.key_dim
        q = part.rows[:, part.at : part.at + size]
        q = q if a.bias is None else q + a.bias[:size]
        steps = {name: value for name, value in a.steps.items() if name in ("q_norm", "waves")}
        q, pages = q.reshape(-1, self.shape.heads, self.shape.key_dim), (self.pages[0], [], self.opened)
        return paged_attention_decode(q, *pages, self.plan, recent=recent, **steps, **self._how)

    def expected(self) -> Array:
        """Answers in float64, of queries and keys that are rounded once."""
        s, how = self.shape, self._how
        q, *recent = (to_float(mx.array(x.astype(np.float32)).astype(s.dtype)).astype(np.float64) for x in self.append.expected())
        sinks = None if self.sink_logits is None else to_float(self.sink_logits).astype(np.float64)
        answers = []
        for r in self.rows:
            there = r.past % 64 + r.count - r.kept
            keys, values = (
                np.concatenate(
                    [*(meant[:, p] for p in r.pages), to_float(opened)[r.slot, :, : r.kept], new[r.recent, :, :there]],
                    axis=1,
                    dtype=np.float64,
                )
                for meant, opened, new in zip(self.pages[1], self.opened, recent, strict=True)
            )
            for i in range(r.count):
                newest = r.past + i - 64 * r.first
                oldest = 0 if self.window is None else max(0, newest - self.window + 1)
                for head in range(s.heads):
                    k, v = (x[head // s.group, oldest : newest + 1] for x in (keys, values))
                    weights = softmax(
                        (k @ q[r.start + i, head] * how["scale"])[None], self.softcap, None if sinks is None else sinks[head : head + 1]
                    )
                    answers.append(weights[0] @ v)
        return np.array(answers).reshape(-1, s.heads, s.value_dim)
