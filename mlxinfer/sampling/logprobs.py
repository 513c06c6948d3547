"""Log-probabilities of chosen and of likeliest tokens."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from ..util.dataclass import dataclass

_BLOCK = 256

TokenLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""(log-probability of the chosen token, (id, log-probability) of each of the likeliest)."""


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Log-probabilities (natural) of R rows, on the device."""

    chosen: mx.array
    """float32 `[R]`: chosen tokens."""
    top_ids: mx.array
    """uint32 `[R, k]`: the likeliest tokens, likeliest first."""
    top: mx.array
    """float32 `[R, k]`: their log-probabilities."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top_ids, self.top]

    def read(self) -> list[TokenLogprobs]:
        """Log-probabilities of all rows, on the host."""
        chosen = cast("list[float]", self.chosen.tolist())
        ids, values = cast("list[list[int]]", self.top_ids.tolist()), cast("list[list[float]]", self.top.tolist())
        return [(own, tuple(zip(i, v, strict=True))) for own, i, v in zip(chosen, ids, values, strict=True)]


def logprobs_of(logits: mx.array, tokens: mx.array, k: int) -> LogprobArrays:
    """Log-probabilities of the chosen tokens `[R]` and of the `k` likeliest, from float32 logits `[R, vocab]`."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - total
    if k == 0:
        empty = mx.zeros((logits.shape[0], 0))
        return LogprobArrays(chosen[:, 0], empty.astype(mx.uint32), empty)
    ids = _highest(logits, k)
    top = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-top, axis=-1)
    return LogprobArrays(chosen[:, 0], mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(top, order, axis=-1) - total)


def _highest(logits: mx.array, k: int) -> mx.array:
    """Indices of the k highest of each row, `[R, k]` in any order. Only the k blocks with the highest maxima are searched."""
    rows, size = logits.shape
    blocks = -(-size // _BLOCK)
    if k >= blocks:
        return _partitioned(logits, k)
    padded = mx.pad(logits, [(0, 0), (0, blocks * _BLOCK - size)], constant_values=-mx.inf).reshape(rows, blocks, _BLOCK)
    chosen = _partitioned(mx.max(padded, axis=-1), k)
    values = mx.take_along_axis(padded, chosen[:, :, None], axis=1).reshape(rows, -1)
    ids = (chosen[:, :, None] * _BLOCK + mx.arange(_BLOCK, dtype=mx.uint32)).reshape(rows, -1)
    return mx.take_along_axis(ids, _partitioned(values, k), axis=-1)


def _partitioned(values: mx.array, k: int) -> mx.array:
    return mx.argsort(-values, axis=-1)[:, :k] if k >= values.shape[-1] else mx.argpartition(-values, k - 1, axis=-1)[:, :k]
