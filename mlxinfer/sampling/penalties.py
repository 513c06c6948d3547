"""Repetition, presence and frequency penalties, from counts kept on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from .sampler import Row


class Penalties:
    """What each row has said. `repetition_penalty` (Keskar et al., 2019) looks at prompt and answer, as Hugging Face and vLLM do;
    presence and frequency (OpenAI's) at the answer alone."""

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        counts = np.zeros((len(rows), vocab_size), dtype=np.float32)
        prompts = np.zeros((len(rows), vocab_size), dtype=np.bool_)
        for i, row in enumerate(rows):
            np.add.at(counts[i], np.asarray(row.answer, dtype=np.int64), 1)
            prompts[i, np.asarray(row.prompt, dtype=np.int64)] = True
        self._counts = mx.array(counts)
        for i, row in enumerate(rows):
            if row.unread is not None:
                self._counts = self._counts.at[mx.array([i]), row.unread].add(1)
        self._prompts = mx.array(prompts)
        self._rows = mx.arange(len(rows))
        self._repetition = _column([row.params.repetition_penalty for row in rows])
        self._presence = _column([row.params.presence_penalty for row in rows])
        self._frequency = _column([row.params.frequency_penalty for row in rows])

    @staticmethod
    def of(rows: Sequence[Row], vocab_size: int) -> Penalties | None:
        wanted = any(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty for p in (row.params for row in rows))
        return Penalties(rows, vocab_size) if wanted else None

    def count(self, tokens: mx.array) -> None:
        """Add one token per row, `[R]`, to what has been said."""
        self._counts = self._counts.at[self._rows, tokens].add(1)

    def apply(self, logits: mx.array) -> mx.array:
        """Penalized float32 logits `[R, vocab]`."""
        said = self._counts > 0
        factor = mx.where(said | self._prompts, self._repetition, 1.0)
        logits = mx.where(logits > 0, logits / factor, logits * factor)
        return logits - self._frequency * self._counts - self._presence * said


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, dtype=np.float32)[:, None])
