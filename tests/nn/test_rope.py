"""Rotation of flat rows, and the frequencies of every rope type."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.oracles.plain_step import PlainCache

from mlxinfer.cache.base import AttentionSpec
from mlxinfer.nn.rope import Rope, make_rope

LAYERS = (AttentionSpec(1, 8, 8),)


CLOSE = 5e-3 if mx.metal.is_available() else 1e-5
"""MLX's kernel takes `fast::cos` on a Mac, whose error is 2^-13 within half a turn and more beyond (Metal's specification)."""


def rope(kind: str = "default", head_dim: int = 8, positions: int = 64, **others: Any) -> Rope:
    return make_rope({"rope_type": kind, "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **others}, head_dim, positions)


def longrope(**others: Any) -> Rope:
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 4.0, 6.0, 8.0]}
    return rope("longrope", positions=64, original_max_position_embeddings=16, **factors, **others)


def rotated(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    half = len(frequencies)
    turn = np.exp(1j * positions[:, None, None] * frequencies)
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_each_row_turns_by_its_own_position(partial: float) -> None:
    cache = PlainCache(LAYERS)
    cache.step([(0, 5), (1, 9)])
    step = cache.step([(1, 3), (0, 2)])
    turner = rope(partial_rotary_factor=partial)
    x = np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32)
    expected = rotated(x, np.array([9, 10, 11, 5, 6]), turner.frequencies(0))
    np.testing.assert_allclose(turner.at(step)(mx.array(x)), expected, atol=CLOSE)


def test_sequences_on_both_sides_of_the_boundary_rotate_differently_in_one_step() -> None:
    turner = longrope()
    step = PlainCache(LAYERS).step([(0, 3), (1, 4)], {0: 16, 1: 17})
    x = np.random.default_rng(0).normal(size=(7, 2, 8)).astype(np.float32)
    short = rotated(x[:3], np.arange(3), turner.frequencies(16))
    long = rotated(x[3:], np.arange(4), turner.frequencies(17))
    np.testing.assert_allclose(turner.at(step)(mx.array(x)), np.concatenate([short, long]), atol=CLOSE)


def test_a_mixed_step_agrees_with_one_sequence_at_a_time() -> None:
    turner = rope("dynamic", factor=4.0, positions=8)
    x = mx.array(np.random.default_rng(0).normal(size=(30, 2, 8)).astype(np.float32))
    both = turner.at(PlainCache(LAYERS).step([(0, 10), (1, 20)]))(x)
    alone = [turner.at(PlainCache(LAYERS).step([(0, 10)]))(x[:10]), turner.at(PlainCache(LAYERS).step([(0, 20)]))(x[10:])]
    np.testing.assert_allclose(both, mx.concatenate(alone), atol=CLOSE)


def test_the_sequence_decides_and_not_the_chunk() -> None:
    turner = longrope()
    step = PlainCache(LAYERS).step([(0, 4)], {0: 40})
    x = np.random.default_rng(0).normal(size=(4, 1, 8)).astype(np.float32)
    np.testing.assert_allclose(turner.at(step)(mx.array(x)), rotated(x, np.arange(4), turner.frequencies(40)), atol=CLOSE)


def test_the_dtype_of_heads_is_kept() -> None:
    x = mx.zeros((7, 2, 8), mx.bfloat16)
    assert longrope().at(PlainCache(LAYERS).step([(0, 3), (1, 4)], {1: 17}))(x).dtype == mx.bfloat16
    assert rope().at(PlainCache(LAYERS).step([(0, 7)]))(x).dtype == mx.bfloat16


def test_default_frequencies() -> None:
    np.testing.assert_allclose(rope().frequencies(0), [1, 0.1, 0.01, 0.001])


def test_linear_divides_positions() -> None:
    turner = rope("linear", factor=4.0)
    np.testing.assert_allclose(turner.frequencies(0), rope().frequencies(0) / 4)
    assert turner.context == 4 * 64


def test_proportional_leaves_the_slow_pairs_standing() -> None:
    turner = rope("proportional", partial_rotary_factor=0.5)
    np.testing.assert_allclose(turner.frequencies(0), [1, 0.1, 0, 0])
    x = np.random.default_rng(0).normal(size=(6, 2, 8)).astype(np.float32)
    y = np.array(turner.at(PlainCache(LAYERS).step([(0, 6)]))(mx.array(x)))
    np.testing.assert_allclose(y[..., [2, 3, 6, 7]], x[..., [2, 3, 6, 7]], atol=1e-6)
    assert np.abs(y[1:, :, 0] - x[1:, :, 0]).min() > 0


def test_dynamic_is_plain_until_the_trained_length_and_slower_beyond() -> None:
    turner = rope("dynamic", factor=2.0, positions=32)
    np.testing.assert_allclose(turner.frequencies(32), rope().frequencies(0))
    # base * (2 * 64 / 32 - 1) ^ (8 / 6)
    np.testing.assert_allclose(turner.frequencies(64), (10000 * 3 ** (8 / 6)) ** -(np.arange(0, 8, 2) / 8))
    assert turner.context == 64


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    turner = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=200)
    plain = rope().frequencies(0)
    turns = 200 * plain / (2 * math.pi)
    between = (turns - 1) / 3
    expected = np.where(turns > 4, plain, np.where(turns < 1, plain / 8, plain * ((1 - between) / 8 + between)))
    assert ((turns > 1) & (turns < 4)).any()
    np.testing.assert_allclose(turner.frequencies(0), expected)


def test_yarn_gain() -> None:
    base = {"factor": 4.0, "original_max_position_embeddings": 16}
    assert rope("yarn", **base).gain == pytest.approx(0.1 * math.log(4) + 1)
    assert rope("yarn", **base, attention_factor=1.25).gain == 1.25
    ratio = (0.1 * 0.7 * math.log(4) + 1) / (0.1 * 0.4 * math.log(4) + 1)
    assert rope("yarn", **base, mscale=0.7, mscale_all_dim=0.4).gain == pytest.approx(ratio)
    assert rope("yarn", factor=1.0, original_max_position_embeddings=64).gain == 1
    assert rope("yarn", **base).context == 64


def test_longrope_has_a_boundary_and_a_gain_for_both_sides() -> None:
    turner = longrope()
    plain = rope().frequencies(0)
    np.testing.assert_allclose(turner.frequencies(16), plain / [1.0, 1.5, 2.0, 2.5])
    np.testing.assert_allclose(turner.frequencies(17), plain / [2.0, 4.0, 6.0, 8.0])
    assert turner.regime(16) == turner.regime(1) != turner.regime(17) == turner.regime(64)
    assert turner.boundary == 16
    assert turner.gain == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
