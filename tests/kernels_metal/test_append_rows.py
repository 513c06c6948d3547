"""Appending rows in the emulator: against float64, under sanitizers, in every order, and the bytes that it moves."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.append_rows.launcher import RowPart, append_rows
from mlxinfer.kernels_metal.append_rows.plan import RECENT, NewRows, plan_append
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles.append_scenes import AppendScene
from tests.support.oracles.sealed_pages import to_float

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
ROUNDING = {F32: 2.0**-21, F16: 2.0**-11, BF16: 2.0**-8}
"""Of float32 arithmetic, and half the distance of two numbers of 16 bits, relative to the largest number of a head."""

SCENES = {
    "the first row": AppendScene(((0, 1, 0),), dims=64),
    "a row after others": AppendScene(((0, 1, 5),), ((0, 3, 5),), dim=128, value_dim=128, heads=8, dtype=BF16, dims=128),
    "norms": AppendScene(((1, 1, 40),), ((1, 32, 40),), dim=80, heads=6, dtype=BF16, norms="qk", dims=80),
    "a part rotates": AppendScene(((0, 2, 3),), dim=96, value_dim=64, heads=3, kv_heads=1, dtype=F16, norms="qk", dims=24),
    "only keys are normed": AppendScene(((0, 1, 63),), ((0, 50, 63),), dim=72, value_dim=40, dtype=F16, norms="k", dims=72, joined=False),
    "normed values": AppendScene(((0, 2, 5),), ((0, 3, 5),), dim=96, value_dim=72, dtype=BF16, norms="qk", dims=96, value_eps=1e-2),
    "keys as values": AppendScene(((0, 1, 5),), dim=136, value_dim=136, heads=2, norms="q", dims=8, value_eps=1e-6, values_are_keys=True),
    "nothing to do": AppendScene(((0, 3, 1), (1, 1, 0)), dim=40, value_dim=16, heads=1, kv_heads=1, joined=False),
    "biases": AppendScene(((0, 1, 5), (1, 2, 0)), ((0, 3, 5),), dim=72, value_dim=40, heads=6, dtype=BF16, dims=40, biased=True),
    "biases and norms": AppendScene(((0, 1, 5),), ((0, 3, 5),), dim=64, heads=4, dtype=F32, norms="qk", dims=64, biased=True, joined=False),
    "many sequences": AppendScene(
        ((2, 1, 9), (0, 4, 30), (5, 8, 0)), ((0, 24, 31), (1, 7, 12), (2, 0, 9)), dim=64, heads=6, norms="q", dims=64, dtype=BF16
    ),
    "withdrawn rows": AppendScene(((3, 2, 12), (4, 1, 2)), ((3, 10, 16), (4, 5, 9)), dim=256, value_dim=256, heads=2, kv_heads=1, dims=4),
}
pytestmark = needs_emulator


def answers(scene: AppendScene) -> list[np.ndarray]:
    return [to_float(x) for x in scene.run()]


@pytest.mark.parametrize("name", SCENES)
def test_heads_are_those_of_float64(name: str) -> None:
    s = SCENES[name]
    with emulated():
        found = answers(s)
    for got, plain, expected in zip(found, s.plain(), s.expected(), strict=True):
        assert got.shape == expected.shape
        bound = ROUNDING[s.dtype] * np.abs(expected).max(axis=-1, keepdims=True)
        assert np.all(np.abs(got - expected) <= bound)
        assert np.all(np.abs(to_float(plain) - expected) <= 1.1 * bound + 1e-6)


@pytest.mark.parametrize("name", SCENES)
def test_neither_sanitizers_nor_the_order_of_threads_change_a_bit(name: str) -> None:
    with emulated():
        expected = answers(SCENES[name])
    other = ("tsan", "random", 2) if list(SCENES).index(name) % 2 else ("msan", "forward", 0)
    for mode, order, seed in (("asan", "random", 1), other, ("fast", "reversed", 0)):
        with emulated(mode=mode, order=order, seed=seed):
            for got, want in zip(answers(SCENES[name]), expected, strict=True):
                assert np.array_equal(got, want), (mode, order)


@pytest.mark.parametrize("name", SCENES)
def test_bytes(name: str) -> None:
    """Heads are read once but for the second half of a pair and the sum of squares, which a core still has; nothing is stored twice."""
    s = SCENES[name]
    with emulated(), emulator.count_bytes() as counts:
        made = s.run()
    count = counts.of("append_rows")
    for output, array in zip(("out", "new_keys", "new_values"), made, strict=True):
        assert (count[output].stored, count[output].most_stores) == (array.nbytes, 1)
    begins = {slot: at for slot, _, at in s.sequences}
    before = {slot: (start, stop) for slot, start, stop in s.old}
    goes_on = [new for new in s.plan.new if new[0] in before and before[new[0]][0] <= new[1] <= before[new[0]][1]]
    kept = [begins.get(slot, stop) - start for slot, start, stop in goes_on]
    assert count["old_keys"].loaded == sum(kept) * s.kv_heads * s.dim * s.dtype.size
    assert count["old_values"].loaded == sum(kept) * s.kv_heads * s.value_dim * s.dtype.size
    for part in ("queries", "keys", "values"):
        assert count[part].most_loads <= 3


def test_rows_that_do_not_fit_are_written_into_pages_first() -> None:
    assert plan_append(((0, 1, 16),), [NewRows(0, 0, 1, 16)], rows=1) is not None
    assert plan_append(((0, 0, RECENT),), [NewRows(0, 0, 1, 16)], rows=1) is None
    assert plan_append(((1, 0, RECENT),), [NewRows(0, 0, 1, 16)], rows=1) is not None


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (NewRows(0, 0, 9, 0), "rows 0 to 9"),
        (NewRows(0, 0, 0, 0), "rows 0 to 0"),
        (NewRows(0, 2, 2, 0), "rows 2 to 4 of 3"),
        (NewRows(0, 0, 2, 63), "rows 63 to 65"),
        (NewRows(-1, 0, 2, 0), "slot -1"),
    ],
)
def test_rows_that_cannot_be_are_refused(new: NewRows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_append((), [new], rows=3)


def test_arrays_that_do_not_fit_are_refused() -> None:
    s = SCENES["norms"]
    q, k, v = s.parts
    q_norm, k_norm = s.norm_weights
    good = {"parts": s.parts, "old": s.old_rows, "q_norm": q_norm, "k_norm": k_norm, "waves": s.waves}
    assert s.waves is not None
    for change, message in [
        ({"parts": (q, k, RowPart(v.rows, v.at + 8))}, "does not hold"),
        ({"parts": (q, k, RowPart(v.rows.astype(F32), v.at))}, "float32"),
        ({"old": s.old_rows[::-1]}, "recent rows are"),
        ({"old": []}, "recent rows are none"),
        ({"waves": mx.concatenate([s.waves, s.waves], axis=2)}, "160 channels of 80"),
        ({"bias": mx.zeros((9,), BF16)}, "a bias are"),
        ({"waves": s.waves.astype(F16)}, "cosines and sines"),
    ]:
        with pytest.raises(ValueError, match=message):
            append_rows(**{**good, **change}, plan=s.plan, shape=s.shape)  # type: ignore[arg-type]
