"""The search for top-k and top-p in the emulator, against float64 and against sorting."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.sampling_threshold import reference
from mlxinfer.kernels_metal.sampling_threshold.launcher import threshold
from tests.support.kernels.emulated import emulated, needs_emulator

Limit = tuple[int, float]
"""top_k (0: none) and top_p."""


def limits_of(limits: list[Limit], size: int) -> mx.array:
    rows = [[k if 0 < k < size else size, p] for k, p in limits] + [[0, 0]] * (4 - len(limits))
    return mx.array(np.array(rows, np.float32))


def searched(logits: np.ndarray, limits: list[Limit]) -> np.ndarray:
    return np.array(threshold(mx.array(logits), limits_of(limits, logits.shape[1])))


def exact(row: np.ndarray, limit: Limit, tolerance: float = 0.0) -> float:
    """Return the lowest logit that stays if top_p is `tolerance` higher."""
    k, p = limit
    ordered = np.sort(row.astype(np.float64))[::-1]
    ordered = ordered[: k if 0 < k < len(row) else None]
    weights = np.exp(ordered - ordered[0])
    before = (np.cumsum(weights) - weights) / weights.sum()
    return float(ordered[before < p * (1 + tolerance)].min()) if p < 1 else float(ordered[-1])


def check(logits: np.ndarray, limits: list[Limit]) -> None:
    """The result equals that of a sort, unless the cumulated probability is within a few roundings of top_p."""
    with emulated():
        found = searched(logits, limits)
    for row, limit, got in zip(logits, limits, found[:, 0], strict=True):
        if limit[0] in (0, len(row)) and limit[1] >= 1:
            assert got == -np.inf
        else:
            assert exact(row, limit, 1e-5) <= got <= exact(row, limit, -1e-5), limit
            assert limit[1] < 1 or got == exact(row, limit)


LIMITS: list[Limit] = [(0, 0.9), (40, 1.0), (20, 0.95), (0, 0.5), (1, 0.3), (0, 1.0), (700, 0.999)]


@needs_emulator
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("size", [1024, 5003])
def test_the_lowest_that_stays(size: int, spread: float) -> None:
    random = np.random.default_rng(size)
    check((random.normal(size=(len(LIMITS), size)) * spread + 4).astype(np.float32), LIMITS)


@needs_emulator
def test_ties_zeros_and_what_is_masked() -> None:
    """Few different numbers, so that thousands share a place; both zeros; most of a row forbidden."""
    random = np.random.default_rng(0)
    logits = np.round(random.normal(size=(len(LIMITS), 3001)) * 2).astype(np.float32)
    logits[logits == 0] *= random.choice([1.0, -1.0], size=int((logits == 0).sum())).astype(np.float32)
    check(logits, LIMITS)
    logits[:, 5:-5] = -np.inf
    check(logits, [(min(k, 10), p) for k, p in LIMITS])
    check(np.zeros_like(logits), LIMITS)


@needs_emulator
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "heavy", "steps", "one"]),
    st.lists(st.tuples(st.one_of(st.just(0), st.integers(1, 1500)), st.floats(0.01, 1.0)), min_size=1, max_size=4),
)
def test_any_row_is_cut_where_sorting_cuts_it(seed: int, kind: str, limits: list[Limit]) -> None:
    random = np.random.default_rng(seed)
    shape = (len(limits), 1300)
    logits = {
        "normal": lambda: random.normal(size=shape) * random.uniform(0.1, 10),
        "heavy": lambda: -np.log(np.arange(1, 1301)) * random.uniform(0.5, 2) + np.zeros(shape),
        "steps": lambda: random.integers(-6, 6, size=shape) * 1e-3,
        "one": lambda: np.where(np.arange(1300) == random.integers(1300), 40.0, -10.0) + np.zeros(shape),
    }[kind]().astype(np.float32)
    check(logits, limits)
    top_k, top_p = (limits_of(limits, 1300)[: len(limits), i : i + 1] for i in (0, 1))
    sorted_out = np.array(reference.threshold(mx.array(logits), top_k, top_p))
    with emulated():
        found = searched(logits, limits)
    for row, a, b in zip(logits, found, sorted_out, strict=True):
        values = np.unique(row)
        assert abs(int((values < a).sum()) - int((values < b).sum())) <= 1, "float32 may place one value on the other side of top_p"


@needs_emulator
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
def test_sanitizers_are_silent_and_no_schedule_changes_a_bit(mode: str) -> None:
    logits = (np.random.default_rng(1).normal(size=(4, 1100)) * 2).astype(np.float32)
    limits: list[Limit] = [(0, 0.9), (30, 0.7), (0, 0.2), (0, 1.0)]
    with emulated(mode=mode, order="random", seed=4):
        found = searched(logits, limits)
    with emulated(order="reversed"):
        assert np.array_equal(found, searched(logits, limits))


@needs_emulator
def test_a_confident_row_is_read_about_once() -> None:
    """For a nearly certain prediction, only blocks with likely tokens are read twice."""
    random = np.random.default_rng(2)
    logits = random.normal(size=(1, 16384)).astype(np.float32)
    logits[0, random.choice(16384, 20, replace=False)] += 14
    for limit in ((0, 0.95), (20, 0.95), (5, 1.0)):
        with emulated(), emulator.count_bytes() as counts:
            searched(logits, [limit])
        blocks = counts.of("sampling_blocks")["logits"]
        assert (blocks.loaded, blocks.most_loads) == (logits.nbytes, 1)
        assert counts.of("sampling_threshold")["logits"].loaded < logits.nbytes


@needs_emulator
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_what_is_not_a_number(value: float) -> None:
    """Counts as minus infinity; a row without a finite maximum is not cut."""
    logits = np.random.default_rng(3).normal(size=(2, 1024)).astype(np.float32)
    limits: list[Limit] = [(5, 0.9), (0, 0.8)]
    clean = logits.copy()
    logits[0, 7:90] = value
    clean[0, 7:90] = -np.inf
    with emulated(mode="asan"):
        found, expected = searched(logits, limits), searched(clean, limits)
        assert np.array_equal(searched(np.full_like(logits, -np.inf), limits), [[-np.inf]] * 2)
    assert found[1] == expected[1]
    assert found[0] == (-np.inf if value == np.inf else expected[0])


def test_what_does_not_fit_is_refused() -> None:
    limits = mx.zeros((4, 2))
    with pytest.raises(ValueError, match="logits and limits"):
        threshold(mx.zeros((5, 2048)), limits)
    with pytest.raises(ValueError, match="logits and limits"):
        threshold(mx.zeros((4, 2048), mx.float16), limits)
    with pytest.raises(UnsupportedShapeError, match="1000 logits"):
        threshold(mx.zeros((4, 1000)), limits)
