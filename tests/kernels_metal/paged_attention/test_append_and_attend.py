"""Decode attention that also appends the step's rows: compared with float64, and bit for bit with two launches."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.paged_attention.launcher import paged_attention_append, paged_attention_decode
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles.append_scenes import AppendScene
from tests.support.oracles.appended_attention import AppendedAttention
from tests.support.oracles.sealed_pages import to_float

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
ROUNDING = {F32: 2.0**-20, F16: 2.0**-10, BF16: 2.0**-7}
"""The error of an answer, relative to the largest: rounding it, and the weights of queries and keys that were rounded before."""

SCENES = {
    "the first token": AppendedAttention(AppendScene(((0, 1, 0),), dims=64), (0,)),
    "pages of their own, cut": AppendedAttention(
        AppendScene(((0, 1, 5),), ((0, 3, 5),), dim=128, value_dim=128, heads=8, dtype=BF16, dims=128), (9,), (4, 4), cores=40
    ),
    "norms, odd heads": AppendedAttention(
        AppendScene(((1, 2, 40), (0, 1, 63)), ((1, 32, 40),), dim=80, value_dim=72, heads=6, dtype=F16, norms="qk", dims=24, biased=True),
        (1, 3),
        (8, 3),
        window=100,
        sinks=True,
    ),
    "shared pages, others keep their rows": AppendedAttention(
        AppendScene(
            ((2, 1, 9), (0, 4, 30)),
            ((0, 24, 31), (1, 7, 12), (3, 0, 9)),
            dim=64,
            heads=6,
            kv_heads=1,
            norms="q",
            dims=64,
            dtype=BF16,
            biased=True,
        ),
        (2, 5),
        (16, 16),
        softcap=5.0,
        cores=40,
    ),
    "normed values, from keys": AppendedAttention(
        AppendScene(
            ((1, 2, 40), (0, 1, 63)),
            ((1, 32, 40),),
            dim=72,
            value_dim=72,
            heads=6,
            dtype=F16,
            norms="qk",
            dims=72,
            value_eps=1e-2,
            values_are_keys=True,
        ),
        (1, 3),
        (8, 3),
        window=100,
    ),
    "nothing to do": AppendedAttention(
        AppendScene(((0, 3, 1), (1, 1, 0)), dim=40, value_dim=16, heads=1, kv_heads=1, joined=False), (1, 0)
    ),
}
SANITIZED = ("norms, odd heads", "normed values, from keys", "shared pages, others keep their rows")
"""One of each kind of tile; compiling for all sanitizers takes long."""
pytestmark = needs_emulator


@pytest.mark.parametrize("name", SCENES)
def test_answers_are_those_of_float64_and_bits_those_of_two_launches(name: str) -> None:
    s = SCENES[name]
    assert s.plan.appends
    with emulated():
        found, apart = [to_float(x) for x in s.run()], [to_float(x) for x in s.in_two_launches()]
    for got, expected in zip(found, apart, strict=True):
        assert np.array_equal(got, expected)
    expected = s.expected()
    assert np.abs(found[0] - expected).max() <= ROUNDING[s.shape.dtype] * np.abs(expected).max()


@pytest.mark.parametrize("name", [name if name in SANITIZED else pytest.param(name, marks=pytest.mark.slow) for name in SCENES])
def test_neither_sanitizers_nor_the_order_of_threads_change_a_bit(name: str) -> None:
    s = SCENES[name]
    with emulated():
        expected = [to_float(x) for x in s.run()]
    runs = (("asan", "random", 1), ("tsan", "random", 2), ("msan", "forward", 0), ("trace", "random", 3), ("fast", "reversed", 0))
    for mode, order, seed in runs:
        with emulated(mode=mode, order=order, seed=seed):
            for got, want in zip(s.run(), expected, strict=True):
                assert np.array_equal(to_float(got), want), (mode, order)


@pytest.mark.parametrize("name", SCENES)
def test_queries_are_answered_again_from_what_was_appended(name: str) -> None:
    s = SCENES[name]
    with emulated():
        first, *recent = s.run()
        assert np.array_equal(to_float(s.again(recent)), to_float(first))
    if name in SANITIZED:
        for mode, order in (("asan", "random"), ("tsan", "random"), ("msan", "forward"), ("trace", "reversed")):
            with emulated(mode=mode, order=order, seed=3):
                assert np.array_equal(to_float(s.again(recent)), to_float(first)), mode


@pytest.mark.parametrize("name", SCENES)
def test_recent_rows_are_moved_once(name: str) -> None:
    s = SCENES[name]
    with emulated(), emulator.count_bytes() as counts:
        made = s.run()
    count = counts.of("paged_attention_decode")
    for output, array in zip(("new_keys", "new_values"), made[1:], strict=True):
        assert (count[output].stored, count[output].most_stores) == (array.nbytes, 1)
    assert count["recent_keys"].most_loads <= 1
    assert count["open_keys"].most_loads <= 1
    assert not [launch for launch in counts.launches if launch.kernel == "append_rows"]


def test_rows_that_do_not_fit_into_one_work_item_are_not_appended() -> None:
    wide = AppendedAttention(AppendScene(((0, 8, 3),), dim=80, value_dim=80, heads=16, kv_heads=1, dtype=F16), (2,))
    assert not wide.plan.appends
    with pytest.raises(ValueError, match="8 rows for 1 entries"):
        wide.run()


def test_only_staged_queries_are_normed_and_rotated() -> None:
    s = SCENES["nothing to do"]
    plan = replace(s.plan, tile=replace(s.plan.tile, staged_queries=0))
    with pytest.raises(ValueError, match="must be normed and rotated before"):
        paged_attention_decode(mx.zeros((4, 1, 40)), s.pages[0], [], s.opened, plan, scale=1.0, waves=mx.zeros((4, 2, 8)))


def test_a_plan_for_other_rows_is_refused() -> None:
    s, other = SCENES["the first token"], SCENES["nothing to do"]
    a = s.append
    with pytest.raises(ValueError, match="are not what this plan"):
        paged_attention_append(a.parts, a.old_rows, a.plan, other.pages[0], [], other.opened, other.plan, scale=1.0)
