"""Packed matrices that are kept on disk: a later start must compute the same from them, and never from what is stale or damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu import Packed
from mlxinfer.loading.load import LoadedModel, load
from mlxinfer.loading.repack_cache import directory, finish_background_work, kept_bytes, open_copies
from mlxinfer.loading.repack_cache.layout import copy_path
from mlxinfer.nn.packing import objects
from tests.support.plain_step import PlainCache
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.skipif(kernels_cpu.packed_version() is None, reason="packed matrices cannot be mapped here")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLXINFER_PACKED_GB", "1")
    yield
    finish_background_work()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def logits(loaded: LoadedModel) -> np.ndarray:
    step = PlainCache(loaded.model.layers).step([(0, 9)])
    return np.array(loaded.model.logits(loaded.model.hidden(mx.arange(9), step)))


def settled(model: Path) -> np.ndarray:
    """Logits after a load and all the writing that it causes."""
    found = logits(load(model))
    finish_background_work()
    return found


def has_copy(model: Path) -> bool:
    copies = open_copies(model)
    return copies is not None and copies.found


def inode(model: Path) -> int:
    return copy_path(model).stat().st_ino


def precisions(loaded: LoadedModel) -> set[str]:
    return {node.precision for node in objects(loaded.model) if isinstance(node, Packed)}


def test_the_next_start_maps_what_was_packed(model: Path) -> None:
    assert not has_copy(model)
    first = settled(model)
    assert has_copy(model)
    written = inode(model)
    assert np.array_equal(settled(model), first)
    assert inode(model) == written  # nothing to add
    assert kept_bytes() == copy_path(model).stat().st_size


def test_the_matrices_are_those_of_the_copy(model: Path) -> None:
    first = settled(model)
    with copy_path(model).open("r+b") as file:
        file.seek(4096 + 64)
        file.write(bytes(1024))
    assert not np.array_equal(logits(load(model)), first)


def test_a_copy_in_use_moves_into_memory(model: Path) -> None:
    first = settled(model)
    loaded = load(model)
    finish_background_work()
    assert np.array_equal(logits(loaded), first)


def test_the_precision_is_that_of_the_later_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_CPU_PRECISION", "float32")
    exact = settled(model)
    written = inode(model)
    monkeypatch.setenv("MLXINFER_CPU_PRECISION", "int8")
    loaded = load(model)
    assert precisions(loaded) == {"int8"}
    assert not np.array_equal(logits(loaded), exact)
    monkeypatch.setenv("MLXINFER_CPU_PRECISION", "float32")
    assert np.array_equal(settled(model), exact)
    assert inode(model) == written


def test_a_model_that_was_replaced_is_packed_again(model: Path) -> None:
    first = settled(model)
    before = model.stat()
    other = write_tiny_gguf(model.with_name("other.gguf"), seed=1)
    assert other.stat().st_size == before.st_size
    expected = logits(load(other))
    finish_background_work()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, model)  # the same path, size and time of change
    assert not has_copy(model)
    assert np.array_equal(settled(model), expected)
    assert not np.array_equal(expected, first)
    assert has_copy(model)


def test_two_models_of_one_size_have_a_copy_each(model: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = write_tiny_gguf(tmp_path / "b" / model.name, seed=1)
    first, second = settled(model), settled(other)
    assert not np.array_equal(first, second)
    assert has_copy(model)
    assert has_copy(other)
    assert np.array_equal(settled(model), first)
    assert np.array_equal(settled(other), second)


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "text", "header", "index", "preamble", "directory"])
def test_a_damaged_copy_is_ignored_and_written_again(model: Path, damage: str) -> None:
    first = settled(model)
    path = copy_path(model)
    whole = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    else:
        path.write_bytes(DAMAGED[damage](whole))
    assert np.array_equal(settled(model), first)
    if damage != "directory":  # which is not ours to remove
        assert path.read_bytes() == whole
    assert not list(directory().glob("*.part"))


def _changed(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


DAMAGED = {
    "cut": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"\0",
    "empty": lambda whole: b"",
    "text": lambda whole: b"hello",
    "header": lambda whole: _changed(whole, 9),
    "index": lambda whole: _changed(whole, 60),
    "preamble": lambda whole: _changed(whole, 4096 + 56),
}


def test_nothing_is_kept_where_that_is_switched_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_PACKED_GB", "0")
    settled(model)
    assert open_copies(model) is None
    assert not directory().exists()


def test_a_home_that_cannot_be_written_costs_nothing_but_the_copy(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path / "file" / "below"))
    assert np.array_equal(settled(model), settled(model))
    assert not has_copy(model)


def test_a_full_disk_leaves_nothing_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    settled(model)
    assert list(directory().iterdir()) == []


def test_the_copy_that_was_not_used_for_longest_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [write_tiny_gguf(tmp_path / f"{name}.gguf", seed) for seed, name in enumerate("abc")]
    for age, path in enumerate(models[:2]):
        settled(path)
        os.utime(copy_path(path), (1e9 + age, 1e9 + age))
    settled(models[0])  # has been used now
    size = kept_bytes() // 2
    monkeypatch.setenv("MLXINFER_PACKED_GB", str(2.5 * size / 1e9))
    settled(models[2])
    assert [has_copy(path) for path in models] == [True, False, True]
    monkeypatch.setenv("MLXINFER_PACKED_GB", str(0.5 * size / 1e9))
    settled(models[1])
    assert not has_copy(models[1])


def test_what_a_killed_process_left_is_removed(model: Path) -> None:
    directory().mkdir(parents=True)
    old, new = directory() / "x1.part", directory() / "x2.part"
    for path in (old, new):
        path.write_text("")
    os.utime(old, (1e9, 1e9))
    settled(model)
    assert not old.exists()
    assert new.exists()


def test_an_open_copy_outlives_its_replacement(model: Path) -> None:
    settled(model)
    loaded = load(model)
    expected = logits(loaded)
    copy_path(model).unlink()
    assert np.array_equal(logits(loaded), expected)


def test_processes_at_the_same_time_leave_one_whole_copy(model: Path) -> None:
    script = f"from mlxinfer.loading.load import load\nload({str(model)!r})"
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert has_copy(model)
    assert list(directory().iterdir()) == [copy_path(model)]
