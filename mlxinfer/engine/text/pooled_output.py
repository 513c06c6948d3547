"""The output of a text that is pooled to a vector."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...types import Chunk, Completion, FinishReason, Usage
from ..core.events import Event, Pooled
from ..core.sequence import Sequence, request_stats


class PooledOutput:
    """Implements `Output`. Its chunks have no text; with the last one `vector` is set."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.vector: np.ndarray | None = None
        """float32 `[n]`, after the end with "stop"."""
        self._sum: mx.array | None = None
        self._past = 0
        self._is_whole = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """See `Output`. The sequence ends before its last part arrives here."""
        if self._is_whole:
            return "stop"
        reason = self.sequence.finish_reason
        return None if reason == "stop" else reason

    def take(self, event: Event) -> Chunk:
        """Take the next part, or the end. A preempted sequence sends all parts again."""
        if isinstance(event, Pooled):
            self._sum = event.part if self._sum is None or event.past <= self._past else self._sum + event.part
            self._past, self._is_whole = event.past, event.is_last
            if event.is_last:
                self.vector = np.array(self._sum[0])
        reason = self.finish_reason
        return Chunk("", finish_reason=reason, usage=self._usage if reason else None)

    def completion(self) -> Completion:
        """See `Output`; it has no text."""
        return Completion("", [], self.finish_reason or "cancelled", self._usage)

    @property
    def _usage(self) -> Usage:
        return Usage(len(self.sequence.prompt), 0, stats=request_stats(self.sequence))
