"""Rotations with three positions: which pairs turn by which, and that text runs as without images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.oracles.plain_step import PlainCache, PlainStep

from mlxinfer import kernels_cpu
from mlxinfer.cache.base import AttentionParams, AttentionSpec, HeadSteps, Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models.config_reader import ConfigReader
from mlxinfer.models.rope_config import MRopeLayout, read_rope
from mlxinfer.nn.mrope import MRope, chunked_axes, interleaved_axes
from mlxinfer.nn.rope import Rope

LAYERS = (AttentionSpec(1, 16, 16),)
CLOSE = 5e-3 if mx.metal.is_available() else 1e-5
INTERLEAVED, CHUNKED = MRopeLayout(interleaved=True), MRopeLayout(interleaved=False)
IMAGE = np.array([[3, 4, 5, 5, 5, 5, 5, 5, 8, 9], [3, 4, 5, 5, 5, 6, 6, 6, 8, 9], [3, 4, 5, 6, 7, 5, 6, 7, 8, 9]], np.int32)
"""Text, an image of 2 x 3, text."""


def rope(layout: MRopeLayout = INTERLEAVED, sections: Any = (4, 2, 2), **others: Any) -> Rope:
    given = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": sections, **others}
    return read_rope(ConfigReader({"rope_parameters": given}), 16, 64, mrope=layout, partial=1.0)


def step_of(*segments: Segment) -> PlainStep:
    return PlainStep(PlainCache(LAYERS), segments)


def rotated(x: np.ndarray, positions: np.ndarray, axes: list[int]) -> np.ndarray:
    """Rotate each pair i of rows `[n, heads, 16]` by position `axes[i]` of `[3, n]`."""
    angles = positions[axes].T * 100.0 ** -(np.arange(8) / 8)
    turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 3, 16)).astype(np.float32)


def test_axes() -> None:
    assert interleaved_axes([24, 20, 20], 64).tolist() == [0, 1, 2] * 20 + [0] * 4
    assert interleaved_axes([11, 11, 10], 32).tolist() == [0, 1, 2] * 10 + [0, 1]
    assert chunked_axes([16, 24, 24]).tolist() == [0] * 16 + [1] * 24 + [2] * 24


@pytest.mark.parametrize(("layout", "axes"), [(INTERLEAVED, [0, 1, 2, 0, 1, 2, 0, 0]), (CHUNKED, [0, 0, 0, 0, 1, 1, 2, 2])])
def test_pairs_turn_by_their_own_position(layout: MRopeLayout, axes: list[int]) -> None:
    turner, x = rope(layout), rows(15)
    step = step_of(Segment(0, 0, 10, 3, 20, rope=IMAGE), Segment(1, 10, 2, 30, 32, shift=-7), Segment(2, 12, 3, 5, 8))
    text = np.array([23, 24, 5, 6, 7])
    expected = rotated(x, np.concatenate([IMAGE, np.tile(text, (3, 1))], axis=1), axes)
    rotation = turner.at(step)
    np.testing.assert_allclose(rotation(mx.array(x)), expected, atol=CLOSE)
    waves = np.array(rotation.waves)
    pairs = (x[..., :8] + 1j * x[..., 8:]) * (waves[:, :1] + 1j * waves[:, 1:])
    np.testing.assert_allclose(np.concatenate([pairs.real, pairs.imag], axis=-1), expected, atol=1e-5)
    found = []
    for radians, first, count in rotation.parts:
        found += [np.array(radians) * position for position in range(first, first + count)]
    np.testing.assert_array_equal(np.stack([np.cos(found), np.sin(found)], axis=1).astype(np.float32), waves)
    assert [(first, count) for _, first, count in rotation.parts] == [(3, 3), *[(1, 1)] * 5, (8, 2), (23, 2), (5, 3)]


def test_the_digits_of_a_text_row_do_not_depend_on_images_in_its_step() -> None:
    turner, x = rope(), mx.array(rows(13))
    text = Segment(1, 0, 3, 30, 33, shift=-7)
    alone = turner.at(step_of(text))(x[10:])
    together = turner.at(step_of(Segment(0, 0, 10, 3, 20, rope=IMAGE), replace(text, start=10)))(x)
    np.testing.assert_array_equal(alone, together[10:])
    np.testing.assert_array_equal(turner.at(step_of(Segment(1, 0, 3, 23, 26)))(x[10:]), alone)
    as_text = turner.at(step_of(Segment(0, 0, 2, 3, 20)))(x[:2])
    np.testing.assert_array_equal(as_text, together[:2])


def test_a_step_of_text_rotates_as_without_axes() -> None:
    turner = rope()
    assert isinstance(turner, MRope)
    plain = Rope(turner.dims, turner.context, turner.frequencies, turner.regime)
    step = step_of(Segment(0, 0, 4, 9, 13), Segment(1, 4, 1, 3, 4))
    assert type(turner.at(step)) is type(plain.at(step))
    assert turner.at(step).parts == plain.at(step).parts


@pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())
def test_the_cpu_kernels_attend_with_the_same_rotation() -> None:
    turner, layers = rope(CHUNKED), (AttentionSpec(1, 16, 16, query_heads=3),)
    segments = (Segment(0, 0, 10, 0, 20, rope=IMAGE), Segment(1, 10, 2, 0, 2, shift=40))
    rng = np.random.default_rng(1)
    qkv = [mx.array(rng.normal(size=(12, 16 * heads)).astype(np.float32)) for heads in (3, 1, 1)]
    cache = PagedCache(layers, dtype=mx.float32, kv_cache_tokens=256, chunk=64)
    assert [cache.open(), cache.open()] == [0, 1]
    answers = []
    for step in (cache.begin(list(segments)), PlainStep(PlainCache(layers), segments)):
        answers.append(np.array(step.attend_rows(0, qkv, HeadSteps(rotation=turner.at(step)), AttentionParams(0.25))))
    np.testing.assert_allclose(*answers, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "changes", "named"),
    [
        (CHUNKED, {"sections": [4, 2, 1]}, "mrope_section"),
        (CHUNKED, {"sections": [4, 4]}, "mrope_section"),
        (INTERLEAVED, {"sections": [4, -2, 2]}, "mrope_section"),
        (INTERLEAVED, {"sections": "4, 2, 2"}, "mrope_section"),
        (INTERLEAVED, {"mrope_interleaved": False}, "mrope_interleaved"),
        (CHUNKED, {"mrope_interleaved": True}, "mrope_interleaved"),
        (INTERLEAVED, {"mrope_interleaved": 1}, "mrope_interleaved"),
        (INTERLEAVED, {"rope_type": "dynamic", "factor": 2.0}, "mrope_section"),
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_named(layout: MRopeLayout, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        rope(layout, **changes)


def test_the_published_spellings() -> None:
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    found = read_rope(ConfigReader(old), 16, 64, mrope=CHUNKED)
    assert isinstance(found, MRope)
    assert found.axes.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    both = MRopeLayout(interleaved=None)
    assert not isinstance(read_rope(ConfigReader({"rope_theta": 1e6}), 16, 64, mrope=both), MRope)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert rope(CHUNKED, **yarn).gain > 1
    with pytest.raises(UnsupportedModelError, match="mrope"):
        read_rope(ConfigReader(old), 16, 64)
