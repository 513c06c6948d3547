"""Recurrent states are read in place and replaced, and each sequence keeps its own in any company."""

import re
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache.base import RecurrentSpec, Segment
from mlxinfer.cache.state import RecurrentStore


def running_sum(x: mx.array, states: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
    total = states[0][:, None] + mx.cumsum(x, axis=1)
    return total, (total[:, -1],)


def new_store(slots: int) -> RecurrentStore:
    store = RecurrentStore(RecurrentSpec(((3,),)))
    for slot in range(slots):
        store.reset(slot)
    return store


def step(store: RecurrentStore, parts: list[tuple[int, int]], inputs: mx.array | None = None) -> mx.array:
    """Advance (slot, count) together."""
    segments, start = [], 0
    for slot, count in parts:
        segments.append(Segment(slot, start, count, 0, 0))
        start += count
    return store.run(tuple(segments), mx.ones((start, 3)) if inputs is None else inputs, running_sum)


def primitives(store: RecurrentStore, y: mx.array, file) -> Counter[str]:
    mx.export_to_dot(str(file), y, *store.arrays)
    return Counter(re.findall(r'label ?="(\w+)"', file.read_text()))


@pytest.mark.parametrize(
    ("slots", "parts"),
    [(1, [(0, 1)]), (5, [(3, 1)]), (3, [(0, 1), (1, 1), (2, 1)]), (4, [(2, 7), (0, 7)])],
    ids=["one", "one of five", "all", "two of four"],
)
def test_states_are_not_gathered_while_the_same_go_on(slots, parts, tmp_path):
    store = new_store(slots)
    step(store, parts)
    mx.eval(store.arrays)
    found = primitives(store, step(store, parts), tmp_path / "graph.dot")
    assert found["CumSum"] == 1, found
    assert not {"Gather", "GatherAxis", "Scatter", "Concatenate", "SliceUpdate", "DynamicSliceUpdate"} & set(found), found


def test_what_is_left_of_a_group_keeps_only_itself_alive():
    store = new_store(4)
    step(store, [(0, 1), (1, 1), (2, 1), (3, 1)])
    for slot in (1, 2):
        store.release(slot)
    step(store, [(3, 1)])
    assert sum(a.shape[0] for a in store.arrays) == 2
    store.release(0)
    assert [a.tolist() for a in store.arrays] == [[[2, 2, 2]]]


def test_a_slot_that_is_taken_again_is_not_the_one_before():
    store = new_store(2)
    step(store, [(0, 2), (1, 2)])
    store.release(1)
    store.reset(1)
    assert step(store, [(0, 1), (1, 1)]).tolist() == [[3] * 3, [1] * 3]


def test_any_company_gives_each_its_own():
    rng = np.random.default_rng(1)
    store, sums = new_store(5), np.zeros((5, 3), np.float32)
    for _ in range(60):
        live = rng.permutation(5)[: rng.integers(1, 6)]
        parts = [(int(slot), int(rng.integers(1, 4))) for slot in live]
        inputs = rng.integers(-3, 4, (sum(count for _, count in parts), 3)).astype(np.float32)
        got, start, want = np.array(step(store, parts, mx.array(inputs))), 0, []
        for slot, count in parts:
            want.append(sums[slot] + np.cumsum(inputs[start : start + count], 0))
            sums[slot] = want[-1][-1]
            start += count
        np.testing.assert_array_equal(got, np.concatenate(want))
        one = int(rng.integers(5))
        if rng.random() < 0.2:
            store.copy(one, (one + 1) % 5)
            sums[(one + 1) % 5] = sums[one]
        elif rng.random() < 0.2:
            store.release(one)
            store.reset(one)
            sums[one] = 0
        np.testing.assert_array_equal(np.array(store.of(one)[0])[0], sums[one])
