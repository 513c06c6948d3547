"""Caches with random content, decode attention over them, and what float64 and stock MLX make of the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlxinfer.kernels_metal.formats import v_group
from mlxinfer.kernels_metal.paged_attention.launcher import paged_attention_decode
from mlxinfer.kernels_metal.paged_attention.plan import DecodePlan, Pools, SegmentRows, plan_decode
from mlxinfer.kernels_metal.paged_attention.reference import attention
from mlxinfer.kernels_metal.paged_attention.tiles import Shape

from .sealed_pages import Array, seal_keys, seal_values, to_float
from .softmax import softmax


@dataclass(frozen=True)
class Scene:
    """`sequences` are pairs of rows and length, the rows being the last tokens. Page ids are shuffled over the pool."""

    sequences: tuple[tuple[int, int], ...]
    k_bits: int = 4
    v_bits: int = 4
    dim: int = 64
    value_dim: int = 0
    heads: int = 1
    kv_heads: int = 2
    dtype: mx.Dtype = mx.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    first: bool = False
    cores: int = 10
    seed: int = 0
    spread: float = 1.0
    apart: int = 0
    """Rows of the open page, at most, that lie apart from it."""

    @property
    def shape(self) -> Shape:
        value_dim = self.value_dim or self.dim
        return Shape(self.dtype, self.heads * self.kv_heads, self.kv_heads, self.dim, value_dim, self.k_bits, self.v_bits)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def query_rows(self) -> int:
        return sum(count for count, _ in self.sequences)

    @cached_property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @cached_property
    def tokens(self) -> list[list[Array]]:
        """Keys and values `[Hkv, length, D]` of each sequence, rounded to the dtype, channels of K shifted as in real models."""
        made = []
        for _, length in self.sequences:
            shift = self.random.normal(size=(self.kv_heads, 1, self.dim)) * self.spread
            keys = self.random.normal(size=(self.kv_heads, length, self.dim)) + shift
            values = self.random.normal(size=(self.kv_heads, length, self.shape.value_dim))
            made.append([to_float(mx.array(x.astype(np.float32)).astype(self.dtype)) for x in (keys, values)])
        return made

    @cached_property
    def q(self) -> mx.array:
        return mx.array(self.random.normal(size=(self.query_rows, self.shape.heads, self.dim)).astype(np.float32)).astype(self.dtype)

    @cached_property
    def sink_logits(self) -> mx.array | None:
        return mx.array(self.random.normal(size=self.shape.heads).astype(np.float32) + 1) if self.sinks else None

    def sealed_pages(self, length: int, count: int) -> int:
        return (length - count) // 64

    @cached_property
    def page_ids(self) -> list[list[int]]:
        """Of all sealed pages of each sequence, as the table has them; pages outside the window have none."""
        numbers = [self.sealed_pages(length, count) for count, length in self.sequences]
        free = list(self.random.permutation(sum(numbers) + 1)[: sum(numbers)])
        ids = [[int(free.pop()) for _ in range(n)] for n in numbers]
        if self.first:
            for i, pages in enumerate(ids):
                pages[:1] = [~i] * len(pages[:1])
        return ids

    @property
    def pools(self) -> Pools:
        pages = sum(self.sealed_pages(length, count) for count, length in self.sequences) + 1
        entries, recent = (len(self.sequences), max(self.recent_rows(length) for _, length in self.sequences)) if self.apart else (0, 0)
        return Pools(pages, len(self.sequences) if self.first else 0, len(self.sequences) + 1, entries, recent)

    def recent_rows(self, length: int) -> int:
        """Return the number of a sequence's rows outside its open page."""
        return min(self.apart, (length - 1) % 64 + 1)

    @cached_property
    def recent(self) -> list[mx.array]:
        """The rows apart from the open pages, the first sequence's last."""
        if not self.apart:
            return []
        s, pools = self.shape, self.pools
        arrays = [np.full((pools.entries, s.kv_heads, pools.recent, d), np.nan, np.float32) for d in (s.key_dim, s.value_dim)]
        for i, (pair, (_, length)) in enumerate(zip(self.tokens, self.sequences, strict=True)):
            count = self.recent_rows(length)
            for array, x in zip(arrays, pair, strict=True):
                array[-1 - i, :, :count] = x[:, length - count :]
        return [self._cast(x) for x in arrays]

    @cached_property
    def arrays(self) -> tuple[list[mx.array], list[mx.array], list[mx.array]]:
        """The pools, the first pages, the open pages. What no sequence has written is NaN or all ones: it must not be read."""
        s, pools = self.shape, self.pools
        keys = np.full((s.kv_heads, pools.pages, 64, s.key_dim), 7.0, np.float32)
        values = np.full((s.kv_heads, pools.pages, 64, s.value_dim), 7.0, np.float32)
        first = [np.full((s.kv_heads, pools.first_pages, 64, d), np.nan, np.float32) for d in (s.key_dim, s.value_dim)]
        opened = [np.full((pools.slots, s.kv_heads, 64, d), np.nan, np.float32) for d in (s.key_dim, s.value_dim)]
        for i, (pair, ids) in enumerate(zip(self.tokens, self.page_ids, strict=True)):
            for j, (x, pool) in enumerate(zip(pair, (keys, values), strict=True)):
                for page, p in enumerate(ids):
                    (first[j] if p < 0 else pool)[:, ~p if p < 0 else p] = x[:, 64 * page : 64 * page + 64]
                rest = x[:, 64 * len(ids) : x.shape[1] - self.recent_rows(x.shape[1])]
                opened[j][i, :, : rest.shape[1]] = rest
        sealed = self._sealed(keys, s.k_bits, None) + self._sealed(values, s.v_bits, v_group(s.value_dim))
        firsts = [np.swapaxes(first[0], -1, -2), first[1]] if self.first else []
        return sealed, [self._cast(x) for x in firsts], [self._cast(x) for x in opened]

    def _sealed(self, pages: Array, bits: int, group: int | None) -> list[mx.array]:
        if bits == 16:
            return [self._cast(np.swapaxes(pages, -1, -2) if group is None else pages)]
        arrays, _ = seal_keys(pages, bits) if group is None else seal_values(pages, bits, group)
        return [mx.array(a) for a in arrays]

    def _cast(self, x: Array) -> mx.array:
        return mx.array(np.ascontiguousarray(x)).astype(self.dtype)

    @cached_property
    def rows(self) -> list[SegmentRows]:
        rows, start = [], 0
        for i, (count, length) in enumerate(self.sequences):
            past = length - count
            gone = 0 if self.window is None else max(0, past - self.window + 1) // 64
            kept = length - self.recent_rows(length) - past // 64 * 64 if self.apart else 64
            rows.append(SegmentRows(i, start, count, past, self.page_ids[i][gone:], gone, kept, len(self.sequences) - 1 - i))
            start += count
        return rows

    @cached_property
    def plan(self) -> DecodePlan:
        return plan_decode(self.shape, self.rows, self.pools, query_rows=self.query_rows, window=self.window, cores=self.cores)

    def run(self) -> mx.array:
        return paged_attention_decode(
            self.q, *self.arrays, self.plan, scale=self.scale, recent=self.recent, softcap=self.softcap, sinks=self.sink_logits
        )

    @cached_property
    def meant(self) -> list[list[Array]]:
        """Keys and values of each sequence as its rows see them, in float64."""
        s = self.shape
        seen = []
        for (count, length), pair in zip(self.sequences, self.tokens, strict=True):
            begin, end = 64 * int(self.first), 64 * self.sealed_pages(length, count)
            both = []
            for x, bits, group in zip(pair, (s.k_bits, s.v_bits), (None, v_group(s.value_dim)), strict=True):
                y = x.astype(np.float64)
                if bits != 16 and end > begin:
                    pages = x[:, begin:end].reshape(s.kv_heads, -1, 64, x.shape[-1])
                    sealed = seal_keys(pages, bits)[1] if group is None else seal_values(pages, bits, group)[1]
                    y[:, begin:end] = sealed.reshape(s.kv_heads, -1, x.shape[-1])
                both.append(y)
            seen.append(both)
        return seen

    def expected(self) -> Array:
        """In float64."""
        s = self.shape
        q = to_float(self.q).astype(np.float64)
        sinks = None if self.sink_logits is None else to_float(self.sink_logits).astype(np.float64)
        answers, start = [], 0
        for (count, length), (keys, values) in zip(self.sequences, self.meant, strict=True):
            for row in range(count):
                newest = length - count + row
                oldest = 0 if self.window is None else max(0, newest - self.window + 1)
                for head in range(s.heads):
                    scores = keys[head // s.group, oldest : newest + 1] @ q[start + row, head] * self.scale
                    weights = softmax(scores[None], self.softcap, None if sinks is None else sinks[head : head + 1])[0]
                    answers.append(weights @ values[head // s.group, oldest : newest + 1])
            start += count
        return np.array(answers).reshape(start, s.heads, s.value_dim)

    def stock(self) -> Array:
        """Dequantized to the dtype, and MLX's own attention on that."""
        answers, start = [], 0
        for (count, _), (keys, values) in zip(self.sequences, self.meant, strict=True):
            q = self.q[start : start + count].swapaxes(0, 1)
            k, v = (mx.array(x.astype(np.float32)).astype(self.dtype) for x in (keys, values))
            a = attention(q, k, v, scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sink_logits)
            answers.append(to_float(a.swapaxes(0, 1)))
            start += count
        return np.concatenate(answers)


def largest(x: Array) -> float:
    return float(np.max(np.abs(x)))
