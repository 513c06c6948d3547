"""Reads windows with a model that is larger than the memory: one block of layers at a time, all windows together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx

from .. import kernels_cpu
from ..cache.base import Rotation, Segment
from ..cache.paged import PagedCache
from ..errors import MLXInferError
from ..loading.load import open_checkpoint
from ..loading.weights import CheckpointWeights
from ..models import architecture, build, supports
from ..models.block import Block
from ..models.decoder import Decoder
from ..models.vlm_text import TEXT_MODELS, text_config
from ..nn.linear import Embedding, Linear
from ..nn.packing import objects, settle
from ..nn.weights import Dense
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
    that are done. Raises `MLXInferError` for a checkpoint that cannot be loaded.
    """
    checkpoint = open_checkpoint(path, raw_blocks=kernels_cpu.in_use())
    try:
        config = checkpoint.config
        weights = CheckpointWeights(checkpoint, dtype)
        reader = _Reader(text_config(config) if config["model_type"] in TEXT_MODELS else config, windows, dtype, tell)
        model = build(config, weights, ready=reader.read)
        weights.finish()
    finally:
        checkpoint.close()
    assert isinstance(model, Decoder)
    model.joined = False  # the states are not normed yet
    first = 0
    for window in windows.windows:
        last = first + len(window.ids)
        for start in range(first, last, _ROWS):
            logits = model.logits(reader.states[start : min(start + _ROWS, last)])
            mx.eval(logits)
            yield logits
        first = last


class _Reader:
    """Takes the parts of a model as they are built. Blocks are dropped when the windows have passed through."""

    def __init__(self, config: dict[str, object], windows: Windows, dtype: mx.Dtype, tell: Callable[[int], None] | None) -> None:
        plan, sizes = architecture(config), [len(window.ids) for window in windows.windows]
        self.states = mx.zeros((0,))
        self._plan, self._windows, self._tell, self._done = plan, windows, tell, 0
        cache = PagedCache(plan.specs, dtype=dtype, kv_cache_tokens=sum(sizes) + 64 * len(sizes), chunk=max(sizes))
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._step = cache.begin([Segment(cache.open(), start, size, 0, size) for start, size in zip(starts, sizes, strict=True)])
        self._rotations: dict[str, Rotation] = {name: rope.at(self._step) for name, rope in plan.ropes.items()}

    def read(self, part: object) -> None:
        """Takes the next part."""
        settle(part, precision="float32")
        if isinstance(part, Embedding):
            x = part(mx.array([token for window in self._windows.windows for token in window.ids], mx.int32))
            self.states = x * mx.array(self._plan.embedding_scale, x.dtype) if self._plan.embedding_scale != 1.0 else x
        elif isinstance(part, Block):
            self.states = part(self.states, self._step, self._rotations)
            mx.eval(self.states)
            self._step.full.clear()  # nobody reads the pages of a layer that is done
            for node in objects(part):
                if isinstance(node, (Linear, Embedding)):
                    node.matrix = Dense(mx.zeros((1, 1)))
            self._done += 1
            if self._tell:
                self._tell(self._done)
        mx.eval(self.states)
        mx.clear_cache()
