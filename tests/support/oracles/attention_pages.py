"""Sequences whose keys and values go through the CPU kernels' pages, and what attention over them gives in float64."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxinfer import kernels_cpu
from mlxinfer.cache.kv_quantization import seal_keys, seal_values, unseal_keys, unseal_values

from .packed_matrices import DTYPES

PAGE = 64
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


@dataclass
class Setting:
    kv_heads: int
    per_kv: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    pages: str = "float32"
    k_bits: int = 16
    v_bits: int = 16
    first16: bool = False

    def seal(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Pages `[Hkv, n, 64, D]`."""
        return seal_keys(keys, self.k_bits) + seal_values(values, self.v_bits)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.array(mx.array(x.astype(np.float32)).astype(DTYPES[dtype]).astype(mx.float32))


class History:
    """One sequence's queries, keys and values, as the dtypes round them, and what attention over all of them gives in float64."""

    def __init__(self, setting: Setting, length: int, seed: int):
        rng = np.random.default_rng(seed)
        s = setting
        heads = s.kv_heads * s.per_kv
        self.q = rounded(rng.standard_normal((length, heads, s.key_dim)), s.dtype)
        self.k = rounded(rounded(rng.standard_normal((length, s.kv_heads, s.key_dim)), s.dtype), s.pages)
        self.v = rounded(rounded(rng.standard_normal((length, s.kv_heads, s.value_dim)), s.dtype), s.pages)
        self.sinks = rng.standard_normal(heads).astype(np.float32)

    def pages(self, setting: Setting) -> tuple[mx.array, mx.array]:
        """The full pages of keys and of values, `[Hkv, n, 64, D]`."""
        n = len(self.k) // PAGE
        kept = [mx.array(x[: n * PAGE].swapaxes(0, 1)).astype(DTYPES[setting.pages]) for x in (self.k, self.v)]
        return tuple(x.reshape(x.shape[0], n, PAGE, x.shape[-1]) for x in kept)

    def sealed(self, setting: Setting) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as queries in later pages see them."""
        kept = [self.k.copy(), self.v.copy()]
        full = len(self.k) // PAGE * PAGE
        if full and (setting.k_bits, setting.v_bits) != (16, 16):
            keys, values = self.pages(setting)
            keys = unseal_keys(seal_keys(keys, setting.k_bits), setting.k_bits, mx.float32)
            values = unseal_values(seal_values(values, setting.v_bits), setting.v_bits, values.shape[-1], mx.float32)
            for x, pages in zip(kept, (keys, values), strict=True):
                first = PAGE if setting.first16 else 0
                x[first:full] = np.array(pages.astype(mx.float32)).reshape(x.shape[1], full, -1).swapaxes(0, 1)[first:]
        return kept[0], kept[1]

    def expected(self, setting: Setting, scale: float, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Attention in float64: over the query's own page as it is, over those before it as they are sealed."""
        s = setting
        q = self.q[rows].astype(np.float64)
        position, token = np.arange(len(self.q))[rows, None], np.arange(len(self.k))[None]
        own = position // PAGE == token // PAGE
        forms = [(self.k, self.v), self.sealed(s)] if (s.k_bits, s.v_bits) != (16, 16) else [(self.k, self.v)]
        forms = [tuple(np.repeat(x.astype(np.float64), s.per_kv, 1) for x in kv) for kv in forms]
        both = [np.einsum("qhd,khd->hqk", q, k) * scale for k, _ in forms]
        scores = np.where(own, both[0], both[-1])
        if s.softcap:
            scores = s.softcap * np.tanh(scores / s.softcap)
        distance = position - token
        seen = (distance >= 0) & (distance < (s.window or len(self.k)))
        scores = np.where(seen, scores, -np.inf)
        extra = self.sinks[:, None, None].astype(np.float64) if s.sinks else np.full((scores.shape[0], 1, 1), -np.inf)
        top = np.maximum(scores.max(-1, keepdims=True), extra)
        weights = np.exp(scores - top)
        weights = weights / (weights.sum(-1, keepdims=True) + np.exp(extra - top))
        parts = [np.where(mine, weights, 0) for mine in (own, ~own)] if len(forms) == 2 else [weights]
        return sum(np.einsum("hqk,khd->qhd", w, v) for w, (_, v) in zip(parts, forms, strict=True))


FORMS = ["heads", "views", "joined", "q k+v", "q+k v", "q k v"]


def arranged(rows: list[mx.array], form: str) -> list[mx.array]:
    """Queries, keys and values as heads, as strided heads, or as the arrays `[T, n]` that `form` names."""
    if form == "heads":
        return rows
    if form == "views":
        return [mx.concatenate([r, r], axis=-1)[:, :, : r.shape[-1]] for r in rows]
    flat = [r.reshape(r.shape[0], -1) for r in rows]
    names = ["q+k+v"] if form == "joined" else form.split()
    return [mx.concatenate([flat["qkv".index(part)] for part in name.split("+")], axis=-1) for name in names]


class Cache:
    """The pages of several sequences under numbers drawn at random; those that hold nothing are full of ones or NaN."""

    def __init__(self, setting: Setting, sequences: int, pages: int, seed: int = 0):
        s = setting
        self.setting = setting
        self.free = np.random.default_rng(seed).permutation(pages).tolist()
        self.free_first = list(range(sequences))
        self.tables: list[list[int]] = [[] for _ in range(sequences)]
        dims, dtype = (s.key_dim, s.value_dim), DTYPES[s.pages]
        empty = [mx.full((s.kv_heads, 1, PAGE, d), float("nan"), dtype) for d in dims]
        unused = [
            a if a.dtype == dtype else mx.full(a.shape, 0x7FC07FFF if a.dtype == mx.uint32 else float("nan"), a.dtype)
            for a in s.seal(*empty)
        ]
        self.sealed = [mx.repeat(a, pages, axis=1) for a in unused]
        shapes = [(s.key_dim, PAGE), (PAGE, s.value_dim)] if s.first16 else []
        self.first = [mx.full((s.kv_heads, sequences, *shape), float("nan"), dtype) for shape in shapes]
        self.open = [mx.full((sequences, s.kv_heads, PAGE, d), float("nan"), dtype) for d in dims]

    def step(self, parts: list[tuple[int, History, int, int]], scale: float = 0.3, form: str = "heads", **steps) -> np.ndarray:
        """`(slot, history, past, count)` each."""
        s, start, segments = self.setting, 0, []
        for slot, _, past, count in parts:
            oldest = 0 if s.window is None else max(past - s.window + 1, 0) // PAGE
            segments.append((slot, start, count, past, oldest, self.tables[slot][oldest:]))
            start += count
        rows = [np.concatenate([getattr(h, n)[past : past + count] for _, h, past, count in parts]) for n in "qkv"]
        arrays = arranged([mx.array(r).astype(DTYPES[s.dtype]) for r in rows], form)
        plan = kernels_cpu.attention_plan(segments, s.window)
        sinks = mx.array(parts[0][1].sinks).astype(DTYPES[s.dtype]) if s.sinks else None
        form_of = {"k_bits": s.k_bits, "v_bits": s.v_bits, "first": self.first}
        out, self.open, full, first = kernels_cpu.paged_attention(
            arrays, self.sealed, self.open, plan, scale=scale, softcap=s.softcap, sinks=sinks, **form_of, **steps
        )
        mx.eval(out, self.open, full, first)
        self._seal(parts, full, first)
        return np.array(out.astype(mx.float32)).reshape(start, -1, s.value_dim)

    def _seal(self, parts: list[tuple[int, History, int, int]], full: list[mx.array], first: list[mx.array]) -> None:
        done, first_done = 0, 0
        for slot, _, past, count in parts:
            for page in range(past // PAGE, (past + count) // PAGE):
                if first and page == 0:
                    place = self.free_first.pop()
                    self.tables[slot].append(~place)
                    for pool, new in zip(self.first, first, strict=True):
                        pool[:, place] = new[:, first_done]
                    first_done += 1
                    continue
                place = self.free.pop()
                self.tables[slot].append(place)
                for pool, new in zip(self.sealed, full, strict=True):
                    pool[:, place] = new[:, done]
                done += 1
        assert all(a.shape[1] == done for a in full)
        assert all(a.shape[1] == first_done for a in first)


def check(got: np.ndarray, want: np.ndarray, setting: Setting) -> None:
    np.testing.assert_allclose(got, want, atol=TOLERANCE[setting.dtype], rtol=TOLERANCE[setting.dtype])
