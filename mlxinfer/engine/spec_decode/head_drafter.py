"""Draft heads: the model's own head, or one trained for it, which reads the model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx

from ...cache.base import PAGE, Segment
from ...cache.paged import PagedCache
from ...models.decoder import Model
from ...nn.packing import arrays
from ...sampling import KeptNoise, SamplingBatch
from ..core.sequence import Sequence


class HeadDrafter:
    """Implements `TokenDrafter`. The head's keys and values are in the model's cache, where every step appends them for its tokens. The
    step that verifies drafts overwrites what the head appended for them. A head that reads the model's pages appends nothing. It samples
    with each sequence's parameters, seed and positions, as `DraftModel` does."""

    def __init__(self, model: Model, cache: PagedCache, noise: KeptNoise | None = None) -> None:
        """`noise`: shared with the rows that verify drafts."""
        assert model.mtp is not None
        self._noise = None if noise is None else noise.draw
        self.model = model
        self.cache = cache
        self.cost = _relative_bytes(model)
        self._layers = model.mtp.places
        self._appends = not model.mtp.reads
        self._blind = model.mtp.embedding is not None
        """True if it reads embeddings of its own, so that it sees no images."""
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None

    def room(self, sequence: Sequence) -> int:
        known = sequence.num_tokens
        if sequence.images is not None and self._blind:
            return 0
        if sequence.hooks is not None or known // PAGE != sequence.num_computed_tokens // PAGE:
            return 0
        return max(min(PAGE - known % PAGE, self.model.max_context - known), 0)

    def catch_up(self, sequences: Many[Sequence]) -> None:
        pass

    def propose(self, wanted: Many[tuple[Sequence, int]]) -> None:
        wanted = sorted(wanted, key=lambda one: -one[1])
        drafts: list[list[mx.array]] = [[] for _ in wanted]
        before = self._hidden_rows([s for s, _ in wanted])
        tokens = mx.array([s.tokens[-1] for s, _ in wanted], dtype=mx.int32)
        for turn in range(wanted[0][1]):
            rows = [s for s, count in wanted if count > turn]
            before, tokens = self._turn(rows, tokens[: len(rows)], before[: len(rows)], drafts)
            for i in range(len(rows)):
                drafts[i].append(tokens[i : i + 1])
        for (s, _), own in zip(wanted, drafts, strict=True):
            s.propose(own[0] if len(own) == 1 else mx.concatenate(own))

    def verified(self, sequence: Sequence, accepted: int) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        if self._batch is not None and sequence in self._batch[0]:
            self._batch = None

    def _hidden_rows(self, sequences: list[Sequence]) -> mx.array:
        """Hidden states of the last computed tokens, `[R, hidden]`."""
        return self.cache.states(self._layers.state, [s.slot for s in sequences if s.slot is not None])[:, 0]

    def _turn(self, rows: list[Sequence], tokens: mx.array, before: mx.array, drafts: Many[Many[mx.array]]) -> tuple[mx.array, mx.array]:
        """One more draft of each sequence: (the head's rows `[R, n]`, tokens int32 `[R]`)."""
        segments, turn = [], len(drafts[0])
        for i, s in enumerate(rows):
            assert s.slot is not None
            past = s.num_tokens - 1 + (turn if self._appends else 0)
            shift = 0 if s.images is None else s.images.shift
            segments.append(Segment(s.slot, i, 1, past, max(s.rope_length, past + 1), shift=shift))
        step = self.cache.begin(segments) if self._appends else self.cache.reading(segments)
        hidden, scores = self.model.draft(tokens, before, step)
        sampler = self._sampler(rows, drafts)
        positions = [s.num_tokens + turn for s in rows]
        if sampler.takes_columns:
            sampled = scores.at(sampler.column(scores.logits, positions, scores.tokens))
        else:
            sampled = sampler.sample(scores.whole(self.model.vocab_size), positions).tokens
        sampled = sampled.astype(mx.int32)
        if not turn:  # later turns start with the step that verifies them, which is built meanwhile
            mx.async_eval(step.state, hidden, sampled)  # type: ignore[no-untyped-call]
        step.close()
        return hidden, sampled

    def _sampler(self, rows: list[Sequence], drafts: Many[Many[mx.array]]) -> SamplingBatch:
        if self._batch is None or self._batch[0] != rows or self._batch[1].counts_tokens:
            self._batch = rows, SamplingBatch(rows, self.model.vocab_size, self._noise, drafts[: len(rows)])
        return self._batch[1]


def _relative_bytes(model: Model) -> float:
    """Bytes that the head reads, relative to the model's."""
    own = sum(array.nbytes for array in arrays(model.mtp))
    return min(own / max(sum(array.nbytes for array in arrays(model)) - own, 1), 1.0)
