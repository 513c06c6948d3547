"""Reads windows with a model that is larger than the memory: one block of layers at a time, all windows together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import mlx.core as mx

from .. import kernels_cpu
from ..cache.base import BidirectionalSpec
from ..errors import MLXInferError, UnsupportedModelError
from ..loading.load import open_checkpoint
from ..loading.weights import CheckpointWeights
from ..models import architecture, build, supports
from ..models.block import AnyBlock
from ..models.blockwise import BlockReader, batches
from ..nn.packing import settle
from .texts import Windows

_ROWS = 256
"""Positions whose logits are computed at once."""


def can_stream(path: Path) -> bool:
    """Whether a model at a resolved path has a graph here, whose blocks can be read one after another."""
    try:
        checkpoint = open_checkpoint(path)
    except MLXInferError:
        return False
    checkpoint.close()
    return supports(str(checkpoint.config.get("model_type")))


def streamed_logits(path: Path, windows: Windows, dtype: mx.Dtype, tell: Callable[[int], None] | None = None) -> Iterator[mx.array]:
    """float32 logits `[rows, vocab]` of all windows in order, some rows of one window at a time.

    Embedding, head and one block are in memory, with the windows' states `[positions, hidden]`. `tell` is called with the number of blocks
    that are done. Raises `MLXInferError` for a checkpoint that cannot be loaded, that reads texts from both ends, or
    that has a part which `BlockReader` does not know.
    """
    with closing(open_checkpoint(path, raw_blocks=kernels_cpu.in_use())) as checkpoint:
        plan, weights = architecture(checkpoint.config), CheckpointWeights(checkpoint, dtype)
        if any(isinstance(spec, BidirectionalSpec) for spec in plan.specs):
            raise UnsupportedModelError("this model reads texts from both ends, and predicts no next token that could be compared")
        reader = _Reader(plan, batches([window.ids for window in windows.windows]), dtype)
        reader.tell = tell
        model = build(checkpoint.config, weights, ready=reader)
        weights.finish()
    model.joined = False  # the states are not normed yet
    states = mx.concatenate(reader.states)
    first = 0
    for window in windows.windows:
        last = first + len(window.ids)
        for start in range(first, last, _ROWS):
            logits = model.logits(states[start : min(start + _ROWS, last)])
            mx.eval(logits)
            yield logits
        first = last


class _Reader(BlockReader):
    """Multiplies with float32 activations, and counts the blocks."""

    tell: Callable[[int], None] | None = None
    _blocks = 0

    def prepare(self, part: object) -> None:
        settle(part, precision="float32")

    def leave(self, part: object) -> None:
        super().leave(part)
        if isinstance(part, AnyBlock):
            self._blocks += 1
            if self.tell:
                self.tell(self._blocks)
