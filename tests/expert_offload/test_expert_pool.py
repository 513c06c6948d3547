"""Pools of experts: waves, predictions, eviction and sizes, with bytes that are compared with those of the file."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import ExpertReadError
from mlxinfer.expert_offload import ExpertFile, ExpertPool, ExpertReader, ExpertStore, slots_within
from mlxinfer.expert_offload.file_format import LayerRecord, expert_bytes
from tests.support.formats.expert_files import SOURCE, layer_arrays, write_experts

EXPERTS = 12
ALIGNED = {"codes": (2, 512), "scales": (512,)}
"""Shapes whose slots a disk can write into directly."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    write_experts(folder / "odd.experts", 3, EXPERTS).close()
    write_experts(folder / "aligned.experts", 3, EXPERTS, shapes=ALIGNED).close()
    return {"odd": folder / "odd.experts", "aligned": folder / "aligned.experts"}


class CountingRead:
    """`os.preadv` that counts the reads of each record, and may fail for some."""

    def __init__(self, layer: LayerRecord) -> None:
        self.layer = layer
        self.counts: Counter[int] = Counter()
        self.fails: set[int] = set()

    def __call__(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        expert = (offset - self.layer.offset) // self.layer.stride
        self.counts[expert] += 1
        if expert in self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, buffers, offset)


class Opened:
    """A pool of the first layer of a file."""

    def __init__(self, path: Path, slots: int, threads: int = 2) -> None:
        file = ExpertFile.open(path, SOURCE)
        assert file is not None
        self.file = file
        layer = file.layers["layers.0"]
        self.read = CountingRead(layer)
        self.reader = ExpertReader(file, threads, self.read)
        self.pool = ExpertPool(layer, self.reader, slots)
        arrays = layer_arrays(0, EXPERTS, ALIGNED if path.stem == "aligned" else None)
        self.expected = {name: expert_bytes(array) for name, array in arrays.items()}

    def holds(self, slots: np.ndarray, chosen: np.ndarray) -> bool:
        """True if each slot that is not -1 has exactly the bytes of its expert, in all arrays."""
        there = slots >= 0
        assert set(self.pool.arrays) == set(self.expected)
        return all(
            np.array_equal(expert_bytes(array)[slots[there]], self.expected[name][chosen[there]])
            for name, array in self.pool.arrays.items()
        )

    def run(self, chosen: np.ndarray, overlap: bool | None = None) -> int:
        """Check all promises of `waves`. Returns the number of waves."""
        before, waves, covered = Counter(self.read.counts), 0, np.zeros(chosen.shape, int)
        resident = set(self.pool.resident)
        for slots in self.pool.waves(chosen, overlap=overlap):
            assert slots.shape == chosen.shape
            assert slots.dtype == np.int32
            assert slots.max() < self.pool.slots
            assert self.holds(slots, chosen)
            covered += slots >= 0
            waves += 1
        assert (covered == 1).all()
        reads = self.read.counts - before
        assert all(count == 1 for count in reads.values())
        assert set(reads).isdisjoint(resident)
        return waves

    def close(self) -> None:
        self.reader.close()
        self.pool.close()
        self.file.close()


@pytest.fixture
def opened(paths: dict[str, Path]) -> Iterator[Callable[..., Opened]]:
    made: list[Opened] = []

    def opens(slots: int, kind: str = "odd", threads: int = 2) -> Opened:
        made.append(Opened(paths[kind], slots, threads))
        return made[-1]

    yield opens
    for each in made:
        each.close()


calls = st.lists(
    st.one_of(
        st.tuples(st.just("waves"), st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=24), st.sampled_from([None, True, False])),
        st.tuples(st.just("prefetch"), st.lists(st.integers(0, EXPERTS - 1), max_size=8), st.none()),
        st.tuples(st.just("resize"), st.integers(1, EXPERTS), st.none()),
    ),
    max_size=12,
)


@pytest.mark.parametrize("kind", ["odd", "aligned"])
@given(st.integers(1, EXPERTS), calls, st.integers(1, 4))
def test_every_entry_has_its_expert_in_one_wave(
    paths: dict[str, Path], kind: str, slots: int, work: list[tuple[str, Any, bool | None]], width: int
) -> None:
    opened = Opened(paths[kind], slots)
    pool = opened.pool
    try:
        for call, argument, overlap in work:
            if call == "waves":
                chosen = np.array(argument[: max(len(argument) // width, 1) * width], np.uint32)
                shaped = chosen.reshape(-1, width) if len(chosen) % width == 0 else chosen
                waves = opened.run(shaped, overlap)
                distinct = len(set(chosen.tolist()))
                assert waves <= -(-distinct // (pool.slots // 2)) or waves <= 2
            elif call == "prefetch":
                pool.prefetch(np.array(argument, np.int64))
            else:
                pool._drain()
                before = pool.resident
                pool.resize(argument)
                assert len(pool.resident) >= min(len(before), pool.slots)
                assert pool.resident <= before or pool.is_complete
    finally:
        opened.close()


def test_what_fits_is_one_wave_and_stays(opened: Callable[..., Opened]) -> None:
    one = opened(6)
    chosen = np.array([[3, 5], [5, 9]])
    assert one.run(chosen) == 1
    assert one.run(chosen[::-1]) == 1
    assert dict(one.read.counts) == {3: 1, 5: 1, 9: 1}
    assert (one.pool.hits, one.pool.misses) == (3, 3)
    assert one.pool.bytes_read == 3 * one.pool.layer.expert_bytes


def test_more_experts_than_slots_take_waves_of_half(opened: Callable[..., Opened]) -> None:
    one = opened(4)
    assert one.run(np.arange(EXPERTS).reshape(1, -1)) == 6
    assert sum(one.read.counts.values()) == EXPERTS
    # What the last waves left is used first, and not read.
    assert one.run(np.arange(EXPERTS).reshape(1, -1)) == 6
    assert sum(one.read.counts.values()) == 2 * EXPERTS - 4


def test_the_expert_that_is_used_least_is_evicted(opened: Callable[..., Opened]) -> None:
    one = opened(3)
    for expert in (0, 0, 0, 1, 2, 2):
        one.run(np.array([expert]))
    one.run(np.array([7]))
    assert one.pool.resident == {0, 2, 7}


def test_an_old_use_counts_less_than_a_new_one(opened: Callable[..., Opened]) -> None:
    one = opened(3)
    for expert in (0, 0, 0, *[1, 2] * 100):
        one.run(np.array([expert]))
    one.run(np.array([7]))
    assert 0 not in one.pool.resident


def test_a_full_pool_reads_nothing_and_numbers_slots_as_experts(opened: Callable[..., Opened]) -> None:
    one = opened(EXPERTS)
    assert one.pool.is_complete
    assert sum(one.read.counts.values()) == EXPERTS
    chosen = np.array([[4, 0], [11, 4]], np.uint32)
    assert [each.tolist() for each in one.pool.waves(chosen)] == [chosen.tolist()]
    one.run(chosen)
    one.pool.prefetch(chosen)
    assert sum(one.read.counts.values()) == EXPERTS


def test_a_prediction_is_used(opened: Callable[..., Opened]) -> None:
    one = opened(6)
    one.pool.prefetch(np.array([[7, 8]]))
    one.run(np.array([[7, 3]]))
    assert one.read.counts[7] == 1
    assert (one.pool.predicted, one.pool.predicted_used) == (2, 1)


def test_a_prediction_never_evicts_what_is_in_use(opened: Callable[..., Opened]) -> None:
    one = opened(4)
    for slots in one.pool.waves(np.array([[0, 1, 2]])):
        one.pool.prefetch(np.array([5, 6, 7, 8]))
        one.reader.wait([read for _, read in one.pool._pending.values()])
        assert one.holds(slots, np.array([[0, 1, 2]]))
        assert {0, 1, 2} <= one.pool.resident
    assert one.pool.predicted == 1
    one.pool._clock.now += 1  # another layer's experts were read back: the device has used these
    one.pool.prefetch(np.array([5, 6, 7, 8]))
    one.pool._drain()
    assert len(one.pool.resident & {0, 1, 2}) < 3


def test_predictions_give_way_to_what_is_needed(opened: Callable[..., Opened]) -> None:
    one = opened(4, threads=1)
    one.pool.prefetch(np.array([0, 1, 2, 3]))
    one.run(np.array([[8, 9, 10, 11]]))
    assert one.pool.resident == {8, 9, 10, 11}


def test_the_best_experts_survive_a_smaller_pool(opened: Callable[..., Opened]) -> None:
    one = opened(6)
    for chosen in ([0, 1, 2], [3, 4, 5], [0, 1, 2], [0, 4, 4]):
        one.run(np.array([chosen]))
    one.pool.resize(3)
    assert one.pool.slots == 3
    assert one.pool.resident == {0, 4, 1} or one.pool.resident == {0, 4, 2}
    before = sum(one.read.counts.values())
    one.run(np.array([[0, 4]]))
    assert sum(one.read.counts.values()) == before
    one.pool.resize(EXPERTS)
    assert one.pool.is_complete
    assert sum(one.read.counts.values()) == before + EXPERTS - 3
    one.run(np.arange(EXPERTS))


@pytest.mark.parametrize("kind", ["odd", "aligned"])
def test_a_failed_read_is_an_error_and_the_pool_stays_usable(opened: Callable[..., Opened], kind: str) -> None:
    one = opened(6, kind)
    one.run(np.array([[0, 1]]))
    one.read.fails = {7}
    with pytest.raises(ExpertReadError, match="Input/output error"):
        one.run(np.array([[0, 7, 8]]))
    with pytest.raises(ExpertReadError, match=r"cannot read experts from .*experts"):
        one.run(np.arange(EXPERTS).reshape(1, -1))
    one.pool.prefetch(np.array([7]))
    one.read.fails = set()
    one.run(np.array([[0, 1, 7, 8]]))
    one.run(np.arange(EXPERTS).reshape(1, -1))


def test_a_truncated_file_is_an_error(paths: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "cut.experts"
    write_experts(path, 1, EXPERTS).close()
    one = Opened(path, 4)
    one.run(np.array([0, 1]))
    os.truncate(path, one.pool.layer.offset + 5 * one.pool.layer.stride + 100)
    with pytest.raises(ExpertReadError, match="truncated"):
        one.run(np.array([1, 5]))
    one.run(np.array([1, 4]))
    one.close()


def test_a_removed_file_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "gone.experts"
    write_experts(path, 1, EXPERTS).close()
    one = Opened(path, 4)
    path.unlink()
    write_experts(path, 2, 5).close()
    one.run(np.arange(EXPERTS))
    one.close()


def test_numbers_beyond_the_experts_are_refused(opened: Callable[..., Opened]) -> None:
    one = opened(4)
    with pytest.raises(ValueError, match="numbers below 12, not 12"):
        one.run(np.array([[0, EXPERTS]]))


def test_a_store_divides_its_memory(paths: dict[str, Path]) -> None:
    file = ExpertFile.open(paths["odd"], SOURCE)
    assert file is not None
    one = next(iter(file.layers.values())).expert_bytes
    store = ExpertStore(file, 16 * one)
    assert [pool.slots for pool in store.pools.values()] == [6, 5, 5]
    assert store.resident_bytes == 16 * one
    for pool in store.pools.values():
        list(pool.waves(np.array([[0, 1, 2]])))
    assert (store.stats().misses, store.stats().hits, store.stats().bytes_read) == (9, 0, 9 * one)
    store.resize(9 * one)
    assert [len(pool.resident) for pool in store.pools.values()] == [3, 3, 3]
    store.resize(0)
    assert [pool.slots for pool in store.pools.values()] == [2, 2, 2]
    store.resize(10**9)
    assert store.is_complete
    assert store.stats().resident_bytes == file.expert_bytes
    store.close()
    store.close()


def test_slots_fill_the_budget(paths: dict[str, Path]) -> None:
    file = ExpertFile.open(paths["odd"], SOURCE)
    assert file is not None
    one = next(iter(file.layers.values())).expert_bytes
    for count in range(6, 3 * EXPERTS + 1):
        assert sum(slots_within(file.layers, count * one).values()) == count
    file.close()


def test_the_first_fault_is_taken_once(paths: dict[str, Path]) -> None:
    file = ExpertFile.open(paths["odd"], SOURCE)
    assert file is not None
    store = ExpertStore(file, 0)
    store.record_fault(ExpertReadError("first"))
    store.record_fault(ExpertReadError("second"))
    assert str(store.fault) == "first"
    assert str(store.take_fault()) == "first"
    assert store.take_fault() is None
    store.close()


def test_the_first_reads_start_with_the_call(opened: Callable[..., Opened]) -> None:
    one = opened(6)
    chosen = np.array([[1, 2, 3]])
    waves = one.pool.waves(chosen)
    assert set(one.pool._pending) == {1, 2, 3}
    chosen[:] = 0  # memory of the kernels, which is used again
    assert one.holds(next(waves), np.array([[1, 2, 3]]))


def test_arrays_come_from_the_given_allocator(paths: dict[str, Path]) -> None:
    made: list[tuple[tuple[int, ...], mx.Dtype]] = []

    def allocate(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        made.append((shape, dtype))
        array = mx.zeros(shape, dtype)
        mx.eval(array)
        return array

    file = ExpertFile.open(paths["aligned"], SOURCE)
    assert file is not None
    store = ExpertStore(file, 0, slots=dict.fromkeys(file.layers, 5), allocate=allocate)
    assert made == [((5, *shape), mx.uint8) for _ in file.layers for shape in ALIGNED.values()]
    pool = store.pools["layers.1"]
    expected = {name: expert_bytes(array) for name, array in layer_arrays(1, EXPERTS, ALIGNED).items()}
    for slots in pool.waves(np.arange(5)):
        assert all(np.array_equal(expert_bytes(array)[slots], expected[name][:5]) for name, array in pool.arrays.items())
    store.close()
