"""Penalties for what a sequence has said already."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .rows import PickedRows, RaggedRows, Row, column, values


class Penalties:
    """What each sequence has said. `repetition_penalty` (Keskar et al., 2019) looks at prompt and answer, as Hugging Face and vLLM do;
    presence and frequency (OpenAI's) at the answer alone."""

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        params = [row.params for row in rows]
        repetition = values(params, "repetition_penalty")
        self._repeats = any(penalty != 1 for penalty in repetition)
        self._subtracts = any(p.presence_penalty or p.frequency_penalty for p in params)
        self._counts = _counts([row.answer for row in rows], vocab_size)
        for i, row in enumerate(rows):
            if row.pending_token is not None:
                self._counts = self._counts.at[mx.array([i]), row.pending_token].add(1)
        self._prompts = _counts([row.prompt for row in rows], vocab_size) > 0 if self._repeats else None
        self._rows = mx.arange(len(rows))
        self._repetition = column(repetition)
        self._presence = column([p.presence_penalty for p in params])
        self._frequency = column([p.frequency_penalty for p in params])

    @staticmethod
    def of(rows: Sequence[Row], vocab_size: int) -> Penalties | None:
        params = [row.params for row in rows]
        repeats = any(penalty != 1 for penalty in values(params, "repetition_penalty"))
        wanted = repeats or any(p.presence_penalty or p.frequency_penalty for p in params)
        return Penalties(rows, vocab_size) if wanted else None

    @property
    def arrays(self) -> list[mx.array]:
        return [self._counts]

    def count(self, tokens: mx.array, spread: RaggedRows | None = None) -> None:
        """Add what has just been chosen for the rows `[R]`; what was drafted is added with `say`, once it is known what holds."""
        rows = self._rows
        if spread is not None:
            if not spread.plain:
                return
            rows = mx.array([spread.sequences[row] for row in spread.plain])
            tokens = tokens[mx.array(spread.plain)]
        self._counts = self._counts.at[rows, tokens].add(1)

    def say(self, sequence: int, tokens: Sequence[int]) -> None:
        """Add tokens to what a sequence has said."""
        ids = mx.array(np.asarray(tokens, dtype=np.int32))
        self._counts = self._counts.at[mx.full(ids.shape, sequence, mx.int32), ids].add(1)

    def apply(self, logits: mx.array, picked: PickedRows | None = None) -> mx.array:
        """Penalized float32 logits `[R, vocab]`: a row for each sequence, or those that are `picked`."""
        counts = self._counts
        if picked is not None:
            counts = counts[picked.rows]
            if picked.drafted is not None:
                rows, tokens = picked.drafted
                counts = counts.at[mx.array(rows), tokens].add(1)
        said = counts > 0
        if self._prompts is not None:
            factor = mx.where(said | _take(self._prompts, picked), _take(self._repetition, picked), 1.0)
            logits = mx.where(logits > 0, logits / factor, logits * factor)
        if self._subtracts:
            logits = logits - _take(self._frequency, picked) * counts - _take(self._presence, picked) * said
        return logits


def _take(array: mx.array, picked: PickedRows | None) -> mx.array:
    return array if picked is None else array[picked.rows]


def _counts(tokens: Sequence[Sequence[int]], vocab_size: int) -> mx.array:
    """How often each row's tokens occur, float32 `[R, vocab]`."""
    rows = np.repeat(np.arange(len(tokens)), [len(ids) for ids in tokens])
    flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in tokens])
    counts = mx.zeros((len(tokens), vocab_size))
    return counts.at[mx.array(rows), mx.array(flat)].add(1) if flat.size else counts
