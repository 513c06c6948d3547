"""Averages of measured steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.engine.core.step_times import Curve, StepTimes

SIZES = st.integers(1, 600)


def test_nothing_is_known_at_first() -> None:
    times = StepTimes()
    assert times.alone(1) is None
    assert times.prompts.at(64) is None
    assert times.step(1) == times.round(1) == 0
    times.observe(1, 0, 0.003)
    assert times.alone(1) == 0.003
    assert times.prompts.at(64) is None
    times.observe(1, 64, 0.035)
    assert times.prompts.at(64) == pytest.approx(0.032)
    assert times.prompts.at(32) == pytest.approx(0.016)


@given(st.dictionaries(SIZES, st.floats(0.001, 1), min_size=1, max_size=12), st.lists(SIZES, min_size=2))
def test_sizes_not_measured_never_fall(measured: dict[int, float], asked: list[int]) -> None:
    curve = Curve()
    for rows, seconds in measured.items():
        curve.add(rows, seconds)
    values = [curve.at(rows) for rows in sorted(asked) if not curve.knows(rows)]
    assert values == sorted(values)


def test_a_slow_first_step_and_a_hiccup_fade() -> None:
    times = StepTimes()
    times.observe(1, 0, 2.0)
    for _ in range(3):
        times.observe(1, 0, 0.003)
    assert times.alone(1) == pytest.approx(0.003)
    times.observe(1, 0, 5.0)
    assert times.alone(1) < 0.005
    for _ in range(60):
        times.observe(1, 0, 0.012)
    assert times.alone(1) == pytest.approx(0.012, rel=0.05)


def test_sizes_measured_long_ago_are_forgotten() -> None:
    curve = Curve(through_zero=True, memory=10)
    curve.add(64, 1.0)
    for _ in range(25):
        curve.add(32, 0.1)
    assert curve.at(64) == pytest.approx(0.2)
