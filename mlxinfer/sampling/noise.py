"""The noise that rows are sampled with. It follows from a sequence's seed and a position alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

Noise = Callable[[Sequence[int], Sequence[int], int], mx.array]
"""Seeds and positions of R rows, and n, to standard Gumbel noise `[R, n]`."""
_MASK = 2**64 - 1
_MOST = 64
"""Rows that are kept at most."""


def sample_seed(seed: int, index: int) -> int:
    """A 64-bit seed for sample `index` of a request: the SplitMix64 finaliser (Steele et al., 2014) of both."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> mx.array:
    """A threefry key per row, uint32 `[R, 2]`."""
    mixed = [sample_seed(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    # Not by way of numpy: a Ctrl-C that falls into that conversion is lost.
    return mx.array([[m & 0xFFFFFFFF, m >> 32] for m in mixed], dtype=mx.uint32)


def gumbel(keys: mx.array, size: int) -> mx.array:
    """Standard Gumbel noise `[R, size]`, row r from key r: the argmax of logits plus it is a sample of their softmax."""
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def plain_noise(seeds: Sequence[int], positions: Sequence[int], size: int) -> mx.array:
    """`Noise` of rows."""
    return gumbel(row_keys(seeds, positions), size)


class KeptNoise:
    """A draft and the row that verifies it have the same noise, which is drawn once. On a CPU, drawing a row of 50,000 numbers takes a
    twentieth of a step of a model of 135 million weights."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], mx.array] = {}

    def draw(self, seeds: Sequence[int], positions: Sequence[int], size: int) -> mx.array:
        """`Noise` of drafts, which `take` returns once more."""
        if len(self._kept) + len(seeds) > _MOST:
            self._kept.clear()  # of drafts that nobody verified
        drawn = plain_noise(seeds, positions, size)
        self._kept.update({(seed, at, size): drawn[i] for i, (seed, at) in enumerate(zip(seeds, positions, strict=True))})
        return drawn

    def take(self, seeds: Sequence[int], positions: Sequence[int], size: int) -> mx.array:
        """`Noise` of rows that follow drafts, or do not."""
        rows = [self._kept.pop((seed, at, size), None) for seed, at in zip(seeds, positions, strict=True)]
        missing = [i for i, row in enumerate(rows) if row is None]
        if not missing:
            return mx.stack([row for row in rows if row is not None])
        drawn = plain_noise([seeds[i] for i in missing], [positions[i] for i in missing], size)
        if len(missing) == len(rows):
            return drawn
        left = iter([drawn[i] for i in range(len(missing))])
        return mx.stack([next(left) if row is None else row for row in rows])
