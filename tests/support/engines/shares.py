"""Shares of a model's blocks in one process: a thread for each, which meet wherever machines would sum what they have."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.loading.load import prepare
from mlxinfer.models.decoder import BlockStack
from mlxinfer.models.pipeline_stage import Stage
from mlxinfer.models.tensor_parallel import sum_results

from ..oracles.plain_step import PlainCache
from .tiny_engine import GOLDEN

_PATIENCE_S = 60


class Meeting:
    """`Ring.sum` between threads."""

    def __init__(self, count: int) -> None:
        self._held: list[np.ndarray] = [np.zeros(0)] * count
        self._barrier = Barrier(count)

    def sum(self, place: int, rows: mx.array) -> mx.array:
        """The sum of what all have."""
        self._held[place] = np.array(rows)
        self._barrier.wait(_PATIENCE_S)
        found = np.sum(self._held, axis=0)
        self._barrier.wait(_PATIENCE_S)
        return mx.array(found)


def parts_of(name: str, count: int, **options: Any) -> tuple[list[BlockStack], BlockStack]:
    """The blocks of a golden model in shares, and whole."""
    with prepare(GOLDEN / name, **options) as found:
        blocks = len(found.block_bytes)
        shares = [found.read_blocks(Stage(0, blocks, rank, count))[0] for rank in range(count)]
        return shares, found.read_blocks(Stage(0, blocks))[0]


def through(stacks: Sequence[BlockStack], rows: np.ndarray) -> np.ndarray:
    """Rows through the blocks of all shares, or of the only one, which is whole."""
    meeting = Meeting(len(stacks))

    def run(place: int) -> np.ndarray:
        stack = stacks[place]
        if len(stacks) > 1:
            sum_results(stack, lambda part: meeting.sum(place, part))
        step = PlainCache(stack.layers).step([(0, len(rows))])
        return np.array(stack.advance(mx.array(rows), step, stack.rotations(step)))

    with ThreadPoolExecutor(len(stacks)) as pool:
        first, *others = pool.map(run, range(len(stacks)))
    assert all(np.array_equal(first, other) for other in others)
    return first
