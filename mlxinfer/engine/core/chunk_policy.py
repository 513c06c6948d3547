"""Divides sequences into chunks. The scheduler, the runner and the engine ask one policy and have no modes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cache.pages import PAGE

if TYPE_CHECKING:
    from ...config import EngineConfig
    from ...models.decoder import Model
    from .rope_regime import RopeRegime
    from .sequence import Sequence


class ChunkPolicy:
    """Chunks as long as the budget allows. All sequences of a step go through the model together."""

    apart = False
    """True if each sequence goes through the model alone."""
    drafts = True
    """True if drafts may be verified, several rows of a sequence at once."""
    snapshots = True
    """True if sequences may share partial pages."""

    def __init__(self, rope: RopeRegime | None = None) -> None:
        """`rope` determines which answers must be computed token by token; None: none of them."""
        self._rope = rope

    def step_rows(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Rows of the longest step, `max_num_batched_tokens` if possible."""
        return max_num_batched_tokens

    def least_rows(self, max_num_seqs: int) -> int:
        """Rows that the longest step needs for `max_num_seqs` sequences."""
        return max_num_seqs

    def prefill_rows(self, allowed: int, most: int) -> int:
        """Rows of prompts for a step, if the prefill budget allows `allowed` and `most` fit."""
        return allowed

    def token_by_token(self, sequence: Sequence) -> bool:
        """True if the next token must be alone in its chunk, though more are known."""
        return self._stepwise(sequence) and sequence.num_computed_tokens >= len(sequence.prompt)

    def length(self, sequence: Sequence, rows: int) -> int:
        """Tokens of the next chunk, at most `rows`. It ends at snapshot points and forks, otherwise at the end of a page if possible.

        A span is a chunk of its own, even if it has more than `rows`. Image rows and text then have the same numbers in any schedule.
        """
        past = sequence.num_computed_tokens
        if span := self._rows_of_span(sequence):
            return span
        end = min(self._next_stop(sequence), sequence.readable)
        if past + rows >= end:
            return end - past
        aligned = (past + rows) // PAGE * PAGE
        return aligned - past if aligned > past else rows

    def shortened(self, sequence: Sequence, pages: int) -> int:
        """Tokens of the next chunk if it fills at most `pages` pages, fewer than its `length`; 0 for none."""
        if self._rows_of_span(sequence):
            return 0
        past = sequence.num_computed_tokens
        return (past // PAGE + pages) * PAGE - past if pages else PAGE - 1 - past % PAGE

    def may_share(self, sequence: Sequence) -> bool:
        """True if other sequences would have computed the same numbers for the pages that it just filled."""
        return True

    def _stepwise(self, sequence: Sequence) -> bool:
        return self._rope is not None and self._rope.token_by_token(sequence)

    def _rows_of_span(self, sequence: Sequence) -> int:
        """Rows of the span that comes next; 0 if text comes next."""
        if sequence.images is None:
            return 0
        past = sequence.num_computed_tokens
        return next((end - past for first, end in sequence.images.spans if first <= past < end), 0)

    def _next_stop(self, sequence: Sequence) -> int:
        """Latest end of the next chunk, as a length of the sequence."""
        past, prompt = sequence.num_computed_tokens, len(sequence.prompt)
        end = sequence.num_tokens
        if sequence.images is not None:
            end = min(end, next((first for first, _ in sequence.images.spans if first > past), end))
        if past < sequence.fork_point:
            end = min(end, sequence.fork_point)
        end = min(end, next((point for point in sequence.snapshot_points if point > past), end))
        return min(end, prompt) if past < prompt and self._stepwise(sequence) else end


class WholeTexts(ChunkPolicy):
    """Every text in one chunk, for bidirectional models."""

    drafts = False
    snapshots = False

    def __init__(self, longest: int, *, apart: bool) -> None:
        """`longest`: maximum tokens of a text. `apart`: each text goes through the model alone, so that its states do not depend on
        others, to the bit."""
        super().__init__()
        self.apart = apart
        self._longest = longest

    def step_rows(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        return max(max_num_batched_tokens, self._longest)

    def prefill_rows(self, allowed: int, most: int) -> int:
        return most if allowed else 0

    def length(self, sequence: Sequence, rows: int) -> int:
        return sequence.num_tokens if sequence.num_tokens <= rows else 0

    def may_share(self, sequence: Sequence) -> bool:
        return False


class DeterministicChunks(ChunkPolicy):
    """Every row is always computed in a chunk of the same shape, so that answers do not depend on other requests, to the bit.

    A prompt is divided at the end of every page, around every span, and before its last token. Recomputed tokens of an answer go one by
    one. Each sequence goes through the model alone, without drafts."""

    apart = True
    drafts = False
    snapshots = False

    def step_rows(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        return max(max_num_batched_tokens, self.least_rows(max_num_seqs))

    def least_rows(self, max_num_seqs: int) -> int:
        """A whole page, and a row for every other sequence."""
        return max_num_seqs + PAGE - 1

    def prefill_rows(self, allowed: int, most: int) -> int:
        return min(max(allowed, PAGE), most) if allowed else 0

    def length(self, sequence: Sequence, rows: int) -> int:
        if span := self._rows_of_span(sequence):
            return span
        past, prompt = sequence.num_computed_tokens, len(sequence.prompt)
        end = min(self._next_stop(sequence), (past // PAGE + 1) * PAGE)
        if past < prompt - 1:
            end = min(end, prompt - 1)
        return end - past if end - past <= rows else 0

    def shortened(self, sequence: Sequence, pages: int) -> int:
        return 0

    def may_share(self, sequence: Sequence) -> bool:
        """True to the bit only for pages of a prompt without its last token."""
        return sequence.num_computed_tokens < len(sequence.prompt)

    def _stepwise(self, sequence: Sequence) -> bool:
        return True


def chunk_policy(model: Model, config: EngineConfig, rope: RopeRegime) -> ChunkPolicy:
    """The policy of an engine."""
    from ...cache.base import BidirectionalSpec

    if any(isinstance(spec, BidirectionalSpec) for spec in model.layers):
        return WholeTexts(config.max_context, apart=config.deterministic)
    return (DeterministicChunks if config.deterministic else ChunkPolicy)(rope)
