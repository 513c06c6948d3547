"""Sequences with random content that are read further in one step, and what float64 and stock MLX make of the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from mlxinfer.kernels_metal.formats import v_group
from mlxinfer.kernels_metal.paged_attention.plan import Pools, SegmentRows
from mlxinfer.kernels_metal.paged_attention.reference import attention
from mlxinfer.kernels_metal.paged_attention.tiles import Shape
from mlxinfer.kernels_metal.paged_attention_prefill.launcher import paged_attention_prefill
from mlxinfer.kernels_metal.paged_attention_prefill.plan import PrefillPlan, plan_prefill
from mlxinfer.kernels_metal.unseal_pages.launcher import FILLED, FIRST, RAW, SEALED, UnsealPlan, plan_unseal, unseal_pages
from mlxinfer.kernels_metal.unseal_pages.reference import unsealed

from .sealed_pages import Array, seal_keys, seal_values, to_float
from .softmax import softmax

UnsealOperands = tuple[list[mx.array], list[mx.array], list[mx.array], list[mx.array], UnsealPlan, Shape]


@dataclass(frozen=True)
class PrefillScene:
    """`sequences` are pairs of tokens before the step and rows. Page ids are shuffled over the pool."""

    sequences: tuple[tuple[int, int], ...]
    k_bits: int = 4
    v_bits: int = 4
    dim: int = 64
    value_dim: int = 0
    group: int = 2
    kv_heads: int = 2
    dtype: mx.Dtype = mx.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    first16: bool = False
    seed: int = 0

    @property
    def shape(self) -> Shape:
        value_dim = self.value_dim or self.dim
        return Shape(self.dtype, self.group * self.kv_heads, self.kv_heads, self.dim, value_dim, self.k_bits, self.v_bits)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def query_rows(self) -> int:
        return sum(count for _, count in self.sequences)

    @cached_property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @cached_property
    def tokens(self) -> list[tuple[Array, Array]]:
        """Keys and values `[Hkv, past + count, D]` of each sequence, rounded to the dtype, channels of K shifted as in real models."""
        return [
            (self._random(self.kv_heads, n, self.dim, shift=1.0), self._random(self.kv_heads, n, self.shape.value_dim, shift=0.0))
            for n in (past + count for past, count in self.sequences)
        ]

    def _random(self, heads: int, tokens: int, dim: int, *, shift: float) -> Array:
        x = self.random.normal(size=(heads, tokens, dim)) + shift * self.random.normal(size=(heads, 1, dim))
        return to_float(mx.array(x.astype(np.float32)).astype(self.dtype))

    @cached_property
    def q(self) -> mx.array:
        return self._cast(self.random.normal(size=(self.query_rows, self.shape.heads, self.dim)))

    @cached_property
    def sink_logits(self) -> mx.array | None:
        return mx.array(self.random.normal(size=self.shape.heads).astype(np.float32) + 1) if self.sinks else None

    @cached_property
    def page_ids(self) -> list[list[int]]:
        """Of the pages that are sealed before the step."""
        numbers = [past // 64 for past, _ in self.sequences]
        free = [int(i) for i in self.random.permutation(sum(numbers) + 1)]
        ids = [[free.pop() for _ in range(n)] for n in numbers]
        return [[~i, *pages[1:]] if self.first16 and pages else pages for i, pages in enumerate(ids)]

    @property
    def pools(self) -> Pools:
        pages = sum(past // 64 for past, _ in self.sequences) + 1
        return Pools(pages, len(self.sequences) if self.first16 else 0, len(self.sequences) + 1)

    @cached_property
    def plan(self) -> PrefillPlan:
        rows, start = [], 0
        for i, (past, count) in enumerate(self.sequences):
            gone = 0 if self.window is None else max(0, past - self.window + 1) // 64
            rows.append(SegmentRows(i, start, count, past, self.page_ids[i][gone:], gone))
            start += count
        return plan_prefill(self.shape, rows, self.pools, query_rows=start, window=self.window, first16=self.first16)

    @cached_property
    def new(self) -> list[mx.array]:
        """The step's own keys and values `[rows, Hkv, D]`."""
        own = [[x[:, past:] for x in pair] for pair, (past, _) in zip(self.tokens, self.sequences, strict=True)]
        return [self._cast(np.swapaxes(np.concatenate([pair[j] for pair in own], axis=1), 0, 1)) for j in (0, 1)]

    @cached_property
    def cache(self) -> tuple[list[mx.array], list[mx.array], list[mx.array], list[mx.array]]:
        """The pool, the pages that the step fills, the first pages, the open pages. What no token has written is seven or NaN."""
        s, pools = self.shape, self.pools
        sealed = [np.full((s.kv_heads, pools.pages, 64, d), 7.0, np.float32) for d in (s.key_dim, s.value_dim)]
        first = [np.full((s.kv_heads, pools.first_pages, 64, d), np.nan, np.float32) for d in (s.key_dim, s.value_dim)]
        opened = [np.full((pools.slots, s.kv_heads, 64, d), np.nan, np.float32) for d in (s.key_dim, s.value_dim)]
        filled: list[list[Array]] = [[], []]
        for i, ((past, count), ids) in enumerate(zip(self.sequences, self.page_ids, strict=True)):
            for j, x in enumerate(self.tokens[i]):
                for page, number in enumerate(ids):
                    (first[j] if number < 0 else sealed[j])[:, ~number if number < 0 else number] = x[:, 64 * page : 64 * page + 64]
                opened[j][i, :, : past % 64] = x[:, past // 64 * 64 : past]
                for page in range(past // 64, (past + count) // 64):
                    if page or not self.first16:
                        filled[j].append(x[:, 64 * page : 64 * page + 64])
        sealing = [np.stack(pages, axis=1) for pages in filled] if filled[0] and s.k_bits + s.v_bits < 32 else []
        firsts = [np.swapaxes(first[0], -1, -2), first[1]] if self.first16 else []
        return self._sealed(*sealed), self._sealed(*sealing) if sealing else [], [*map(self._cast, firsts)], [*map(self._cast, opened)]

    def _sealed(self, keys: Array, values: Array) -> list[mx.array]:
        s = self.shape
        k = [np.swapaxes(keys, -1, -2)] if s.k_bits == 16 else seal_keys(keys, s.k_bits)[0]
        v = [values] if s.v_bits == 16 else seal_values(values, s.v_bits, v_group(s.value_dim))[0]
        return [
            *([self._cast(x) for x in k] if s.k_bits == 16 else map(mx.array, k)),
            *([self._cast(x) for x in v] if s.v_bits == 16 else map(mx.array, v)),
        ]

    def _cast(self, x: Array) -> mx.array:
        return mx.array(np.ascontiguousarray(x).astype(np.float32)).astype(self.dtype)

    def run(self) -> mx.array:
        return paged_attention_prefill(
            self.q, *self.new, *self.cache, self.plan, scale=self.scale, softcap=self.softcap, sinks=self.sink_logits
        )

    @property
    def unseal_operands(self) -> UnsealOperands:
        """All pages of all kinds, in any order."""
        sealed, filled, first, opened = self.cache
        raw = [x[:1].swapaxes(0, 1) for x in opened]
        counts = [arrays[0].shape[1] if arrays else 0 for arrays in (sealed, filled, first, raw)]
        places = [(kind, number) for kind, count in zip((SEALED, FILLED, FIRST, RAW), counts, strict=True) for number in range(count)]
        random.Random(1).shuffle(places)
        return sealed, filled, first, raw, plan_unseal(places, (counts[0], counts[1], counts[2], counts[3])), self.shape

    def unseal(self) -> tuple[mx.array, mx.array]:
        """Keys and values of all pages, in the compute dtype."""
        return unseal_pages(*self.unseal_operands)

    def unsealed(self) -> tuple[mx.array, mx.array]:
        """The same in plain MLX."""
        return unsealed(*self.unseal_operands)

    @cached_property
    def meant(self) -> list[list[Array]]:
        """Keys and values of each sequence, all full pages in their sealed form, in float64."""
        s = self.shape
        return [
            [self._as_sealed(keys, s.k_bits, None), self._as_sealed(values, s.v_bits, v_group(s.value_dim))] for keys, values in self.tokens
        ]

    def _as_sealed(self, x: Array, bits: int, group: int | None) -> Array:
        y = x.astype(np.float64)
        begin, end = 64 * int(self.first16), x.shape[1] // 64 * 64
        if bits != 16 and end > begin:
            pages = x[:, begin:end].reshape(x.shape[0], -1, 64, x.shape[-1])
            sealed = seal_keys(pages, bits)[1] if group is None else seal_values(pages, bits, group)[1]
            y[:, begin:end] = sealed.reshape(x.shape[0], -1, x.shape[-1])
        return y

    def expected(self) -> Array:
        """In float64."""
        q = to_float(self.q).astype(np.float64)
        sinks = None if self.sink_logits is None else to_float(self.sink_logits).astype(np.float64)
        answers = []
        for raw, sealed, (past, count) in zip(self.tokens, self.meant, self.sequences, strict=True):
            for position in range(past, past + count):
                own = position // 64 * 64
                oldest = 0 if self.window is None else max(0, position - self.window + 1)
                k, v = (
                    np.concatenate([y[:, oldest:own], x[:, max(own, oldest) : position + 1]], axis=1)
                    for x, y in zip(raw, sealed, strict=True)
                )
                grouped = q[len(answers)].reshape(self.kv_heads, self.group, -1)
                scores = (grouped @ np.swapaxes(k, -1, -2)).reshape(self.shape.heads, -1) * self.scale
                weights = softmax(scores, self.softcap, sinks).reshape(self.kv_heads, self.group, -1)
                answers.append((weights @ v).reshape(self.shape.heads, -1))
        return np.array(answers)

    def stock(self) -> Array:
        """Dequantized to the dtype, and MLX's own attention on that, with a mask."""
        answers, start = [], 0
        for raw, sealed, (past, count) in zip(self.tokens, self.meant, self.sequences, strict=True):
            if not count:
                continue
            k, v = (self._cast(np.concatenate([y, x], axis=1)) for x, y in zip(raw, sealed, strict=True))
            places, positions = np.arange(past + count), np.arange(past, past + count)[:, None]
            own = positions // 64 * 64
            seen = np.concatenate([places < own, (places >= own) & (places <= positions)], axis=1)
            if self.window is not None:
                seen &= np.concatenate([places, places]) > positions - self.window
            q = self.q[start : start + count].swapaxes(0, 1)
            a = attention(q, k, v, scale=self.scale, softcap=self.softcap, sinks=self.sink_logits, mask=mx.array(seen))
            answers.append(to_float(a.swapaxes(0, 1)))
            start += count
        return np.concatenate(answers)
