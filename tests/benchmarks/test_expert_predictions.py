"""Right predictions of experts are counted by rank."""

import numpy as np

from benchmarks.experts.predictions import random_router, right_by_rank

ROUTER = np.eye(4)


def test_equal_rows_choose_equal_experts():
    rows = np.random.default_rng(0).standard_normal((50, 16))
    router = random_router(rows, 12, np.random.default_rng(1))
    np.testing.assert_allclose(np.linalg.norm(router, axis=1), 1)
    np.testing.assert_array_equal(right_by_rank(rows, rows, router, 3), [1, 1, 1])


def test_the_most_probable_expert_comes_first():
    before = np.array([[4.0, 3, 2, 1], [1, 4, 3, 2]])  # predicts 0 and 1, 1 and 2
    rows = np.array([[4.0, 1, 3, 2], [1, 4, 3, 2]])  # chooses 0 and 2, 1 and 2
    np.testing.assert_array_equal(right_by_rank(before, rows, ROUTER, 2), [1, 0.5])
