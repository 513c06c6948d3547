"""How sequences are cut into chunks: the scheduler, the runner and the engine ask one object, so that none of them has a mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cache.pages import PAGE

if TYPE_CHECKING:
    from ...config import EngineConfig
    from ...models.decoder import Model
    from .rope_regime import RopeRegime
    from .sequence import Sequence


class ChunkPolicy:
    """Chunks as long as the budget allows, and all sequences of a step in one pass through the model."""

    apart = False
    """Whether each sequence goes through the model by itself."""
    drafts = True
    """Whether drafts may be verified, several rows of a sequence at once."""
    snapshots = True
    """Whether what does not fill a page may be shared by other sequences."""

    def __init__(self, rope: RopeRegime | None = None) -> None:
        """`rope` tells which answers may only be computed token by token; None: all may be computed in chunks."""
        self._rope = rope

    def step_rows(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Rows of the longest step; `max_num_batched_tokens` are wanted."""
        return max_num_batched_tokens

    def least_rows(self, max_num_seqs: int) -> int:
        """Rows that the longest step needs for this many sequences."""
        return max_num_seqs

    def prefill_rows(self, allowed: int, most: int) -> int:
        """Rows of prompts for a step, where the prefill budget allows this many and `most` fit."""
        return allowed

    def token_by_token(self, sequence: Sequence) -> bool:
        """Whether the next token to compute has to be alone in its chunk, though more are known."""
        return self._stepwise(sequence) and sequence.num_computed_tokens >= len(sequence.prompt)

    def length(self, sequence: Sequence, rows: int) -> int:
        """Tokens of the next chunk, at most `rows`: it ends where something is kept or forked, and at a page's end where that is near."""
        past, end = sequence.num_computed_tokens, self._next_stop(sequence)
        if past + rows >= end:
            return end - past
        aligned = (past + rows) // PAGE * PAGE
        return aligned - past if aligned > past else rows

    def shortened(self, past: int, pages: int) -> int:
        """Tokens of a chunk after `past` others that may fill no more than this many pages; 0 for none."""
        return (past // PAGE + pages) * PAGE - past if pages else PAGE - 1 - past % PAGE

    def may_share(self, sequence: Sequence) -> bool:
        """Whether the pages that it has just filled are those that any other sequence would have computed."""
        return True

    def _stepwise(self, sequence: Sequence) -> bool:
        return self._rope is not None and self._rope.token_by_token(sequence)

    def _next_stop(self, sequence: Sequence) -> int:
        """Length at which the next chunk has to end at the latest."""
        past, prompt = sequence.num_computed_tokens, len(sequence.prompt)
        end = sequence.num_tokens
        if past < sequence.fork_point:
            end = min(end, sequence.fork_point)
        end = min(end, next((point for point in sequence.snapshot_points if point > past), end))
        return min(end, prompt) if past < prompt and self._stepwise(sequence) else end


class WholeTexts(ChunkPolicy):
    """Every text in one chunk, for models whose tokens attend to what follows them."""

    drafts = False
    snapshots = False

    def __init__(self, longest: int, *, apart: bool) -> None:
        """`longest`: tokens that a text may have. `apart`: each goes through the model by itself, and its states are the same to the bit in
        any company."""
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
    """Every row is always computed in a chunk of the same shape, so that answers are the same to the bit in any company: a prompt is cut
    at every page's end and before its last token, what is recomputed of an answer goes token by token, each sequence goes through the
    model by itself, and there are no drafts."""

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
        past, prompt = sequence.num_computed_tokens, len(sequence.prompt)
        end = min(self._next_stop(sequence), (past // PAGE + 1) * PAGE)
        if past < prompt - 1:
            end = min(end, prompt - 1)
        return end - past if end - past <= rows else 0

    def shortened(self, past: int, pages: int) -> int:
        return 0

    def may_share(self, sequence: Sequence) -> bool:
        """To the bit that holds only for pages of a prompt, without its last token."""
        return sequence.num_computed_tokens < len(sequence.prompt)

    def _stepwise(self, sequence: Sequence) -> bool:
        return True


def chunk_policy(model: Model, config: EngineConfig, rope: RopeRegime) -> ChunkPolicy:
    """That of an engine."""
    from ...cache.base import BidirectionalSpec

    if any(isinstance(spec, BidirectionalSpec) for spec in model.layers):
        return WholeTexts(config.max_context, apart=config.deterministic)
    return (DeterministicChunks if config.deterministic else ChunkPolicy)(rope)
