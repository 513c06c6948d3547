"""Decode attention in plain MLX that goes by the arrays of its plans alone, as the kernel does: so MLX can trace and replay it on a CPU.

Sizes of intermediate arrays do not depend on how a plan is padded, so that answers are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxinfer.cache.kv_quantization import unseal_keys, unseal_values
from mlxinfer.kernels_metal.append_rows.launcher import Norm, RowPart
from mlxinfer.kernels_metal.append_rows.plan import RECENT, AppendPlan
from mlxinfer.kernels_metal.append_rows.reference import _turned, made_heads
from mlxinfer.kernels_metal.paged_attention.arrays import sink_logits
from mlxinfer.kernels_metal.paged_attention.plan import DecodePlan
from mlxinfer.kernels_metal.paged_attention.tiles import PAGE

MOST_PAGES = 12
"""Sealed pages of a sequence; later ones are not seen."""


class TraceableRead:
    """Attention to pages and recent rows by a plan."""

    def __init__(self, plan: DecodePlan, options: dict[str, Any]) -> None:
        self.plan, self.options = plan, options

    def answers(
        self, q: mx.array, recent: Sequence[mx.array], sealed: Sequence[mx.array], first: Any, opened: Any, logits: mx.array
    ) -> mx.array:
        """`[rows, Hq * Dv]`."""
        shared = 1 if self.plan.shape.k_bits == 16 else 2
        keys, seen = self._tokens(sealed[:shared], first[:1], opened[0], recent[0], self._unsealed_keys)
        values, _ = self._tokens(sealed[shared:], first[1:], opened[1], recent[1], self._unsealed_values)
        y = self._attend(q, keys, values, seen, logits)
        return y.reshape(y.shape[0], -1).astype(self.plan.shape.dtype)

    def _unsealed_keys(self, pages: Sequence[mx.array], bits: int | None = None) -> mx.array:
        return unseal_keys(list(pages), self.plan.shape.k_bits if bits is None else bits, self.plan.shape.dtype)

    def _unsealed_values(self, pages: Sequence[mx.array], bits: int | None = None) -> mx.array:
        s = self.plan.shape
        return unseal_values(list(pages), s.v_bits if bits is None else bits, s.value_dim, s.dtype)

    def _tokens(
        self,
        pools: Sequence[mx.array],
        first: Sequence[mx.array],
        opened: mx.array,
        recent: mx.array,
        unsealed: Callable[..., mx.array],
    ) -> tuple[mx.array, mx.array]:
        """Keys or values that each row may see, `[rows, Hkv, tokens, D]`, and which it sees, `[rows, tokens]`."""
        slot, row, count, past, oldest, _, end, table, _, kept, entry = mx.split(
            self.plan.work[: 11 * self.plan.items].reshape(-1, 11), 11, 1
        )
        rows = mx.arange(self.plan.rows)
        own = (row <= rows) & (rows < row + count) & (end > past // PAGE)  # [items, rows]: which item has the row, and its open page
        item = mx.argmax(own, axis=0)
        slot, row, past, oldest, table, kept, entry = (a[item] for a in (slot, row, past, oldest, table, kept, entry))
        behind = rows[:, None] - row
        position, oldest, page = past + behind, oldest + behind, mx.arange(MOST_PAGES)[None]
        ids = self.plan.table[mx.clip(table + page, 0, self.plan.table.size - 1)]
        shape = (self.plan.rows, opened.shape[1], MOST_PAGES * PAGE, opened.shape[-1])
        far = mx.zeros(shape, opened.dtype)
        if pools[0].shape[1]:
            far = self._chosen(pools, mx.maximum(ids, 0), shape, unsealed)
        if first and first[0].shape[1]:
            own = mx.repeat(ids >= 0, PAGE, axis=1)[:, None, :, None]
            far = mx.where(own, far, self._chosen(first, mx.maximum(-1 - ids, 0), shape, lambda pages: unsealed(pages, 16)))
        near = opened[slot[:, 0]]
        late = recent[entry[:, 0]]
        late = mx.pad(late, [(0, 0), (0, 0), (0, RECENT - late.shape[2]), (0, 0)])
        base = past // PAGE * PAGE
        places = [mx.broadcast_to(mx.arange(MOST_PAGES * PAGE)[None], (self.plan.rows, MOST_PAGES * PAGE))]
        there = [places[0] < base]
        for at, limit in ((base + mx.arange(PAGE)[None], base + kept), (base + kept + mx.arange(RECENT)[None], base + PAGE)):
            places.append(at)
            there.append(at < limit)
        where = mx.concatenate(places, axis=1)
        seen = mx.concatenate(there, axis=1) & (where <= position) & (where >= oldest)
        return mx.concatenate([far, near, late], axis=2), seen

    @staticmethod
    def _chosen(
        pools: Sequence[mx.array], ids: mx.array, shape: tuple[int, ...], unsealed: Callable[[Sequence[mx.array]], mx.array]
    ) -> mx.array:
        """The pages `ids` `[rows, pages]` in the compute dtype, as `shape`."""
        pages = unsealed([mx.take(pool, ids.reshape(-1), axis=1) for pool in pools])
        return mx.unflatten(pages, 1, ids.shape).swapaxes(0, 1).reshape(shape)

    def _attend(self, q: mx.array, keys: mx.array, values: mx.array, seen: mx.array, logits: mx.array) -> mx.array:
        s, options = self.plan.shape, self.options
        queries = q.astype(mx.float32).reshape(q.shape[0], s.kv_heads, s.group, s.key_dim)
        scores = options["scale"] * (queries @ keys.astype(mx.float32).swapaxes(-1, -2))
        if options["softcap"]:
            scores = options["softcap"] * mx.tanh(scores / options["softcap"])
        scores = mx.where(seen[:, None, None], scores, -mx.inf)
        if options["sinks"] is not None:
            sink = mx.broadcast_to(logits[: s.heads].astype(mx.float32).reshape(1, s.kv_heads, s.group, 1), (*scores.shape[:-1], 1))
            scores = mx.concatenate([scores, sink], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., : seen.shape[1]]
        return weights @ mx.where(seen[:, None, :, None], values, 0).astype(mx.float32)


def traceable_decode(
    q: mx.array,
    sealed: Sequence[mx.array],
    first: Any,
    opened: Any,
    plan: DecodePlan,
    *,
    recent: Sequence[mx.array],
    q_norm: Norm | None = None,
    waves: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """In place of `metal.paged_attention_decode`."""
    q = _turned(q.astype(mx.float32), q_norm, waves).astype(q.dtype)
    s = plan.shape
    recent = recent or [mx.zeros((1, s.kv_heads, 1, dim), s.dtype) for dim in (s.key_dim, s.value_dim)]
    y = TraceableRead(plan, options).answers(q, recent, sealed, first, opened, sink_logits(options["sinks"], q.dtype))
    return y.reshape(q.shape[0], plan.shape.heads, -1)


class TraceableAppend(TraceableRead):
    """In place of `metal.append_launch`."""

    def __init__(self, parts: tuple[RowPart, RowPart, RowPart], append: AppendPlan, plan: DecodePlan, **options: Any) -> None:
        assert plan.appends
        self.places = [part.at for part in parts]
        self.append = append
        super().__init__(plan, options)

    def run(
        self, rows: Sequence[mx.array], old: Sequence[mx.array], sealed: Sequence[mx.array], first: Any, opened: Any, logits: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        s, options = self.plan.shape, self.options
        parts = [RowPart(array, at) for array, at in zip(rows[:3], self.places, strict=True)]
        q_norm, k_norm = (
            norm and Norm(weight, norm.eps) for norm, weight in zip((options["q_norm"], options["k_norm"]), rows[4:], strict=True)
        )
        steps = {"bias": rows[3] if options["has_bias"] else None, "q_norm": q_norm, "k_norm": k_norm}
        q, k, v = made_heads((parts[0], parts[1], parts[2]), s, **steps, waves=options["waves"], value_eps=options["value_eps"])
        recent = [self._recent(x, old[i] if old else None) for i, x in enumerate((k, v))]
        return self.answers(q, recent, sealed, first, opened, logits), recent

    def _recent(self, x: mx.array, old: mx.array | None) -> mx.array:
        """`[entries, Hkv, length, D]`."""
        count, length = len(self.append.new), self.append.length
        entry, kept, start, new = mx.split(self.append.entries[: 4 * count].reshape(count, 4, 1, 1), 4, axis=1)
        place = mx.arange(length)[None, None, :, None]
        fresh = mx.take(x, mx.clip(start + place - kept, 0, x.shape[0] - 1)[:, 0, :, 0], axis=0).swapaxes(1, 2)
        before = mx.zeros_like(fresh) if old is None else mx.take(old, entry.reshape(-1), axis=0)
        before = mx.pad(before[:, :, :length], [(0, 0), (0, 0), (0, max(length - before.shape[2], 0)), (0, 0)])
        return mx.where(place < kept, before, mx.where(place < kept + new, fresh, 0)).astype(x.dtype)
