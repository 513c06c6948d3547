"""Means and their errors, compared with explicit formulas and with random samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlxinfer.evaluation.figures import Scores, difference, estimate, figures


def test_the_error_is_that_of_window_means():
    values = np.array([1.0, 2.0, 3.0, 5.0, 4.0, 6.0])
    window = np.array([0, 0, 1, 1, 2, 2], np.int32)
    found = estimate(values, window)
    assert found.mean == pytest.approx(3.5)
    assert found.stderr == pytest.approx(np.std([1.5, 4.0, 5.0], ddof=1) / math.sqrt(3))


def test_one_window_has_no_error_and_missing_values_do_not_count():
    assert estimate(np.array([1.0, 3.0]), np.array([0, 0], np.int32)).stderr is None
    found = estimate(np.array([1.0, np.nan, 3.0, np.nan]), np.array([0, 0, 1, 2], np.int32))
    assert (found.mean, found.stderr) == (2.0, pytest.approx(1.0))
    assert math.isnan(estimate(np.array([np.nan]), np.array([0], np.int32)).mean)


def test_the_error_is_honest_where_positions_of_a_window_go_together():
    """Windows of very unequal lengths have different levels; the spread of many repetitions must match the error."""
    rng, means, errors = np.random.default_rng(0), [], []
    lengths = rng.integers(20, 60, 24)
    window = np.repeat(np.arange(24, dtype=np.int32), lengths)
    for _ in range(400):
        values = rng.normal(0, 1, 24)[window] + rng.normal(0, 1, len(window))
        found = estimate(values, window)
        means.append(found.mean)
        errors.append(found.stderr)
    assert np.std(means) == pytest.approx(np.mean(errors), rel=0.1)
    assert np.std(means) > 3 / math.sqrt(len(window))  # uncorrelated positions would give 1 / sqrt


def test_pairs_are_surer_than_their_parts():
    rng = np.random.default_rng(1)
    window = np.repeat(np.arange(16, dtype=np.int32), 32)
    hard = rng.gamma(1.0, 1.0, 16)[window]
    nll = np.ones(len(window))
    one = Scores(window, nll, hard + rng.normal(0, 0.05, len(window)), rng.random(len(window)) < 0.8)
    two = Scores(window, nll, hard + 0.1 + rng.normal(0, 0.05, len(window)), rng.random(len(window)) < 0.7)
    apart = difference("two", two, "one", one)
    alone = figures("one", (8, 4), one)
    assert apart.kl_mean == pytest.approx(0.1, abs=0.01)
    assert apart.kl_stderr is not None
    assert alone.kl_stderr is not None
    assert apart.kl_stderr < alone.kl_stderr / 10
    assert -0.2 < apart.top1 < 0
    assert alone.bpw == 16.0
    assert difference("one", one, "two", two).kl_mean == -apart.kl_mean


def test_figures_of_known_scores():
    window = np.array([0, 0, 1, 1], np.int32)
    student = Scores(window, np.array([2.0, np.nan, 4.0, np.nan]), np.array([0.0, 0.2, 0.4, 0.6]), np.array([True, False, True, True]))
    teacher = Scores(window, np.array([1.0, np.nan, 3.0, np.nan]))
    found = figures("x", (100, 200), student, teacher)
    assert (found.bpw, found.positions, found.windows) == (4.0, 4, 2)
    assert found.kl_mean == pytest.approx(0.3)
    assert found.kl_max == pytest.approx(0.6)
    assert found.top1 == 0.75
    assert found.ppl == pytest.approx(math.exp(3.0))
    assert found.ppl_ratio == pytest.approx(math.e)
    assert found.ppl_ratio_stderr == pytest.approx(0.0, abs=1e-12)
    assert figures("x", (100, 200), teacher).kl_mean is None
