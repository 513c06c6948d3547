"""Penalties for tokens that a sequence contains already."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .rows import PickedRows, RaggedRows, SampledSequence, column, values


class Penalties:
    """Penalties of each sequence, with the tokens that it contains. `repetition_penalty` (Keskar et al., 2019) counts prompt and answer, as
    in Hugging Face and vLLM; presence and frequency penalties (OpenAI's) count the answer alone."""

    def __init__(self, sequences: Sequence[SampledSequence], unread: Sequence[mx.array | None], vocab_size: int) -> None:
        """`unread`: uint32 `[n]` tokens of each sequence that are on the device only."""
        params = [s.params for s in sequences]
        repetition = values(params, "repetition_penalty")
        self._repeats = any(penalty != 1 for penalty in repetition)
        self._subtracts = any(p.presence_penalty or p.frequency_penalty for p in params)
        self._counts = _counts([s.answer for s in sequences], vocab_size)
        self._counted = [len(s.prompt) + len(s.answer) for s in sequences]
        """Tokens of each sequence, prompt included, that are in `_counts`."""
        for i, tokens in enumerate(unread):
            if tokens is not None:
                self._counts = self._counts.at[mx.array([i]), tokens].add(1)
                self._counted[i] += tokens.shape[0]
        self._prompts = _counts([s.prompt for s in sequences], vocab_size) > 0 if self._repeats else None
        self._rows = mx.arange(len(sequences))
        self._repetition = column(repetition)
        self._presence = column([p.presence_penalty for p in params])
        self._frequency = column([p.frequency_penalty for p in params])

    def count(self, tokens: mx.array, spread: RaggedRows | None = None) -> None:
        """Count the tokens `[R]` just chosen. Accepted drafts are counted later, by `catch_up`."""
        rows = self._rows
        self._counted = [n + (spread is None or not spread.drafts.counts[s]) for s, n in enumerate(self._counted)]
        if spread is not None:
            if not spread.plain:
                return
            rows = mx.array([spread.sequences[row] for row in spread.plain])
            tokens = tokens[mx.array(spread.plain)]
        self._counts = self._counts.at[rows, tokens].add(1)

    def catch_up(self, tokens: Sequence[Sequence[int]]) -> None:
        """Count tokens of each sequence (prompt and answer) that were not counted yet: accepted drafts."""
        for i, (known, counted) in enumerate(zip(tokens, self._counted, strict=True)):
            if counted < len(known):
                ids = mx.array(np.asarray(known[counted:], dtype=np.int32))
                self._counts = self._counts.at[mx.full(ids.shape, i, mx.int32), ids].add(1)
                self._counted[i] = len(known)

    def apply(self, logits: mx.array, picked: PickedRows | None = None) -> mx.array:
        """Penalized float32 logits `[R, vocab]`, for a row of each sequence or for the `picked` rows."""
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
    """Occurrences of each token in each row, float32 `[R, vocab]`."""
    rows = np.repeat(np.arange(len(tokens)), [len(ids) for ids in tokens])
    flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in tokens])
    if flat.size and flat.max() >= vocab_size:  # ids of image rows may lie outside the vocabulary
        rows, flat = rows[flat < vocab_size], flat[flat < vocab_size]
    counts = mx.zeros((len(tokens), vocab_size))
    return counts.at[mx.array(rows), mx.array(flat)].add(1) if flat.size else counts
