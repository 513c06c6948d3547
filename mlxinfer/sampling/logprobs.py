"""Log-probabilities of the chosen and of the likeliest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """`chosen` float32 `[R]`; `top_ids` and `top` `[R, k]`, likeliest first. Natural logarithms."""

    chosen: mx.array
    top_ids: mx.array
    top: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top_ids, self.top]


def logprobs_of(logits: mx.array, tokens: mx.array, k: int) -> LogprobArrays:
    """Of float32 logits `[R, vocab]` and the tokens `[R]` chosen from them."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    if k == 0:
        empty = mx.zeros((logits.shape[0], 0))
        return LogprobArrays(chosen, empty.astype(mx.uint32), empty)
    ids = mx.argsort(-logprobs, axis=-1)[:, :k] if k >= logits.shape[-1] else mx.argpartition(-logprobs, k - 1, axis=-1)[:, :k]
    top = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-top, axis=-1)
    return LogprobArrays(chosen, mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(top, order, axis=-1))
