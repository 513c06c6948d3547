"""Packed matrices on disk: a later start computes the same from them, and ignores stale or damaged ones."""

from __future__ import annotations

import os
import signal
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
from mlxinfer.loading.repack_cache import CacheUsage, cache, cache_usage, directory, kept_bytes, open_copies
from mlxinfer.loading.repack_cache import writer as copy_writer
from mlxinfer.loading.repack_cache.layout import copy_path
from mlxinfer.loading.repack_cache.writer import CopyWriter, WriteProgress
from mlxinfer.nn.packing import objects
from mlxinfer.util.background import finish_background_work
from mlxinfer.util.cache_files import locked, mark_checked
from tests.support.formats.tiny_gguf import write_tiny_gguf
from tests.support.oracles.plain_step import PlainCache

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
    """Logits after a load and all writing that it causes."""
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
    overwrite(model)
    mark_checked(copy_path(model))
    assert not np.array_equal(logits(load(model)), first)


def overwrite(model: Path) -> None:
    """Damage numbers in the middle of a copy, and restore its times."""
    path = copy_path(model)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(4096 + 64)
        file.write(bytes(1024))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("checked", [True, False])
def test_damaged_numbers_are_noticed_and_packed_again(model: Path, caplog: pytest.LogCaptureFixture, checked: bool) -> None:
    first = settled(model)
    whole = copy_path(model).read_bytes()
    if not checked:
        copy_path(model).with_suffix(".checked").unlink()
    overwrite(model)
    assert np.array_equal(settled(model), first)
    assert "was damaged" in caplog.text
    assert copy_path(model).read_bytes() == whole


def test_checksums_are_verified_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(model)
    verified: list[int] = []
    monkeypatch.setattr(cache, "_has_checksums", lambda descriptor, places: not verified.append(descriptor))
    settled(model)
    assert not verified
    copy_path(model).with_suffix(".checked").unlink()  # as after a process that had no time to wait for the disk
    settled(model)
    settled(model)
    assert len(verified) == 1


def test_a_copy_that_was_begun_is_finished(model: Path) -> None:
    first = settled(model)
    whole = copy_path(model).read_bytes()
    copy_path(model).unlink()
    part = copy_path(model).with_suffix(".part")
    part.write_bytes(b"\0" * 4096 + whole[4096 : len(whole) // 2])
    assert cache_usage() == CacheUsage(0, 0, 1, part.stat().st_size)
    inode = part.stat().st_ino
    assert np.array_equal(settled(model), first)
    assert copy_path(model).read_bytes() == whole
    assert copy_path(model).stat().st_ino == inode
    assert cache_usage() == CacheUsage(1, len(whole), 0, 0)


def _writer(model: Path, monkeypatch: pytest.MonkeyPatch) -> CopyWriter:
    """The writer that a load of a model without a copy would run later."""
    found: list[CopyWriter] = []
    monkeypatch.setattr(cache, "later", lambda work, *, at_exit=None, delay_s, nice: found.append(at_exit))
    load(model)
    return found[0]


def _again(writer: CopyWriter) -> CopyWriter:
    """The same writer in another process."""
    return CopyWriter(writer._path, writer._plan.source, writer._matrices)


def _stopped(writer: CopyWriter, pieces: int) -> None:
    """Let a process write `pieces` pieces and end."""
    asked = iter([False] * pieces)
    writer(lambda: next(asked, True))
    writer._steps.close()  # type: ignore[attr-defined]


def test_short_processes_finish_a_copy_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(model)
    whole = copy_path(model).read_bytes()
    copy_path(model).unlink()
    monkeypatch.setattr(copy_writer, "_PIECE", 512)
    monkeypatch.setattr(copy_writer, "_RECORDED", 512)
    writer = _writer(model, monkeypatch)
    pieces = sum(-(-data.nbytes // 512) for data in writer._matrices.values())
    processes = 0
    while not copy_path(model).exists():
        _stopped(_again(writer), pieces // 9)
        processes += 1
        assert processes < 12
    assert processes in (9, 10)
    assert copy_path(model).read_bytes() == whole


@pytest.mark.parametrize("damage", ["record", "layout", "shorter"])
def test_a_record_that_says_nothing_is_not_believed(model: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    settled(model)
    whole = copy_path(model).read_bytes()
    copy_path(model).unlink()
    writer = _writer(model, monkeypatch)
    _stopped(writer, 5)
    part = copy_path(model).with_suffix(".part")
    with part.open("r+b") as file:
        assert WriteProgress.read(file.fileno(), writer._plan).done
        if damage == "record":
            os.pwrite(file.fileno(), b"X", 20)
        elif damage == "layout":
            progress = WriteProgress.read(file.fileno(), writer._plan)
            progress.layout, progress.done = 1, dict.fromkeys(progress.done, 0)
            progress.write(file.fileno(), writer._plan)
        else:
            file.truncate(writer._plan.base + 100)
        assert not WriteProgress.read(file.fileno(), writer._plan).done
    _again(writer)(lambda: False)
    assert copy_path(model).read_bytes() == whole


def test_one_process_at_a_time_writes_a_copy(model: Path) -> None:
    settled(model)
    copy_path(model).unlink()
    with locked(copy_path(model).with_suffix(".part")) as mine:
        assert mine is not None
        settled(model)
        assert not has_copy(model)
    settled(model)
    assert has_copy(model)


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
    def full(descriptor: int, content: bytes, at: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    settled(model)
    assert list(directory().iterdir()) == []


def test_the_copy_that_was_not_used_for_longest_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [write_tiny_gguf(tmp_path / f"{name}.gguf", seed) for seed, name in enumerate("abc")]
    for age, path in enumerate(models[:2]):
        settled(path)
        os.utime(copy_path(path).with_suffix(".checked"), (1e9 + age, 1e9 + age))
    settled(models[0])  # counts as used now
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


@pytest.mark.long
def test_processes_at_the_same_time_leave_one_whole_copy(model: Path) -> None:
    script = f"from mlxinfer.loading.load import load\nload({str(model)!r})"
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert has_copy(model)
    assert {path.suffix for path in directory().iterdir()} <= {".packed", ".checked"}


AT_EXIT = """
import sys, time
from mlxinfer.loading.load import load
from mlxinfer.util import background
load(sys.argv[1])
background.EXIT_BUDGET_S = float(sys.argv[2])
"""


def at_exit(model: Path, budget_s: float) -> None:
    subprocess.run([sys.executable, "-c", AT_EXIT, str(model), str(budget_s)], check=True, timeout=120)


def test_a_process_that_ends_at_once_leaves_a_copy(model: Path) -> None:
    at_exit(model, 60.0)
    assert has_copy(model)


def test_a_process_does_not_write_beyond_its_budget(model: Path) -> None:
    at_exit(model, 0.0)
    assert not has_copy(model)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_exit_ends_the_process_silently(model: Path, number: signal.Signals) -> None:
    script = f"""
import atexit, os, signal
from mlxinfer.loading.load import load
from mlxinfer.loading.repack_cache import cache
load({str(model)!r})
cache.os.pread = lambda *ignored: os.kill(os.getpid(), {int(number)})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-number, "")


@pytest.mark.long
def test_native_work_never_outlives_the_interpreter(model: Path) -> None:
    settled(model)
    script = f"""
import sys, threading
from mlxinfer.loading.load import load
from mlxinfer.util import background
from mlxinfer.loading.repack_cache import cache
sys.setswitchinterval(1e-6)
cache._HUGE_PAGES_DELAY_S = 0.0
threading.Thread(target=lambda: [sum(range(1000)) for _ in range(1000)], daemon=True).start()
loaded = [load({str(model)!r}) for _ in range(8)]
"""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
