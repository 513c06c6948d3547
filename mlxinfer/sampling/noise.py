"""Noise that depends on a row's own seed and position only, so that neighbours in a batch never change an answer."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

_MASK = 2**64 - 1


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
