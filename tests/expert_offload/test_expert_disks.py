"""Experts on disks that become full or fail: real file systems, mounted for a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mlxinfer.errors import ExpertFileError, ExpertReadError
from mlxinfer.expert_offload import ExpertFileWriter, ExpertStore
from mlxinfer.expert_offload.reader import ReadWay
from tests.support.formats.expert_files import SOURCE, layer_arrays, write_experts


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount a file system; skip the test where that is not possible."""
    folder.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("only root can mount a disk, on Linux")
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as folder:
        yield folder


IMAGE = "disk.img"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk in the file `IMAGE` beside it."""
    image = tmp_path / IMAGE
    with image.open("wb") as file:
        file.truncate(16 << 20)
    if shutil.which("mkfs.ext4"):
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True, capture_output=True)
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as folder:
        yield folder


def test_a_full_disk_is_an_error_and_leaves_nothing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.expert_offload.writer._SPARE", 0)
    with ExpertFileWriter(small_disk / "a.experts", SOURCE) as writer:
        writer.add("layers.0", layer_arrays(0, 32))
        with pytest.raises(ExpertFileError, match=r"No space left on device.*MLXINFER_HOME"):
            writer.add("layers.1", layer_arrays(1, 64))
    assert not list(small_disk.iterdir())


def test_a_disk_without_direct_reads_is_read_through_the_cache(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.expert_offload.writer._SPARE", 0)
    store = ExpertStore(write_experts(small_disk / "a.experts", 1), 0, slots={"layers.0": 4})
    list(store.pools["layers.0"].waves(np.arange(8)))
    assert store.stats().bytes_read == 8 * store.pools["layers.0"].layer.expert_bytes
    assert store._reader.way in ReadWay
    store.close()


def test_a_disk_that_fails_is_an_error_and_reads_go_on_after_it(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.expert_offload.writer._SPARE", 0)
    store = ExpertStore(write_experts(disk / "a.experts", 1, 128, shapes={"codes": (65536,)}), 0, slots={"layers.0": 8})
    pool, image = store.pools["layers.0"], disk.parent / IMAGE
    assert store._reader.way == ReadWay.STRAIGHT
    list(pool.waves(np.array([1, 2])))
    whole = image.read_bytes()
    os.truncate(image, 1 << 20)  # nearly all of the disk
    with pytest.raises(ExpertReadError, match="Input/output error"):
        list(pool.waves(np.arange(128)))
    image.write_bytes(whole)
    expected = np.array(layer_arrays(0, 128, {"codes": (65536,)})["codes"])
    for chosen in (np.arange(100, 104), np.array([0, 127])):
        for slots in pool.waves(chosen):
            assert np.array_equal(np.array(pool.arrays["codes"])[slots], expected[chosen])
    store.close()
