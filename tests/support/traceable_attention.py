"""Decode attention in plain MLX that goes by the arrays of its plans alone, as the kernel does: so MLX can trace and replay it on a CPU.

Sizes of intermediate arrays do not depend on how a plan is padded, so that answers are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxinfer.kernels_metal.append_rows.launcher import Norm, Part
from mlxinfer.kernels_metal.append_rows.plan import RECENT, AppendPlan
from mlxinfer.kernels_metal.append_rows.reference import _heads, _turned
from mlxinfer.kernels_metal.paged_attention.plan import DecodePlan
from mlxinfer.kernels_metal.paged_attention.tiles import PAGE

MOST_PAGES = 12
"""Sealed pages of a sequence; later ones are not seen."""


class TraceableAppend:
    """In place of `metal.append_launch`, for pools in 16 bits (here: the compute dtype)."""

    def __init__(self, parts: tuple[Part, Part, Part], append: AppendPlan, plan: DecodePlan, **options: Any) -> None:
        assert plan.appends
        assert (plan.shape.k_bits, plan.shape.v_bits) == (16, 16)
        self.places = [part.at for part in parts]
        self.append, self.plan, self.options = append, plan, options

    def run(
        self, rows: Sequence[mx.array], old: Sequence[mx.array], sealed: Sequence[mx.array], first: Any, opened: Any, logits: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        s, options = self.plan.shape, self.options
        parts = [Part(array, at) for array, at in zip(rows[:3], self.places, strict=True)]
        norms = [norm and Norm(weight, norm.eps) for norm, weight in zip((options["q_norm"], options["k_norm"]), rows[3:], strict=True)]
        q = _turned(_heads(parts[0], s.heads, s.key_dim), norms[0], options["waves"]).astype(s.dtype)
        k = _turned(_heads(parts[1], s.kv_heads, s.key_dim), norms[1], options["waves"]).astype(s.dtype)
        v = _heads(parts[2], s.kv_heads, s.value_dim).astype(s.dtype)
        recent = [self._recent(x, old[i] if old else None) for i, x in enumerate((k, v))]
        keys, seen = self._tokens(sealed[0].swapaxes(-1, -2), opened[0], recent[0])
        values, _ = self._tokens(sealed[1], opened[1], recent[1])
        y = self._attend(q, keys, values, seen, logits)
        return y.reshape(y.shape[0], -1).astype(s.dtype), recent

    def _recent(self, x: mx.array, old: mx.array | None) -> mx.array:
        """`[entries, Hkv, length, D]`."""
        count, length = len(self.append.new), self.append.length
        entry, kept, start, new = mx.split(self.append.entries[: 4 * count].reshape(count, 4, 1, 1), 4, axis=1)
        place = mx.arange(length)[None, None, :, None]
        fresh = mx.take(x, mx.clip(start + place - kept, 0, x.shape[0] - 1)[:, 0, :, 0], axis=0).swapaxes(1, 2)
        before = mx.zeros_like(fresh) if old is None else mx.take(old, entry.reshape(-1), axis=0)
        before = mx.pad(before[:, :, :length], [(0, 0), (0, 0), (0, max(length - before.shape[2], 0)), (0, 0)])
        return mx.where(place < kept, before, mx.where(place < kept + new, fresh, 0)).astype(x.dtype)

    def _tokens(self, pool: mx.array, opened: mx.array, recent: mx.array) -> tuple[mx.array, mx.array]:
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
        shape = (self.plan.rows, pool.shape[0], MOST_PAGES * PAGE, pool.shape[-1])
        far = mx.zeros(shape, pool.dtype) if not pool.shape[1] else mx.take(pool, ids, axis=1).swapaxes(0, 1).reshape(shape)
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
