"""An interrupted conversion that is started again ends in the same bytes as an uninterrupted one."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.models.checkpoints import config_of, random_checkpoint
from support.models.tiny_directory import tiny_directory

from mlxinfer.convert import convert
from mlxinfer.convert.calibrate import blockwise as stream
from mlxinfer.convert.write import tensors, writer
from mlxinfer.convert.write.journal import Journal
from mlxinfer.errors import CheckpointError, DestinationError

OPTIONS: dict[str, Any] = {"bits": 4, "group_size": 32, "shard_bytes": 60000, "measure": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("resume") / "source", config_of("llama", num_hidden_layers=2), dtype=mx.bfloat16)


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, bytes]:
    convert(source, source.parent / "expected", **OPTIONS)
    return contents(source.parent / "expected")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def killed(source: Path, target: Path, place: str, count: int, **options: Any) -> bool:
    """Return True if the conversion reached the place and died there."""
    command = [
        sys.executable,
        "-m",
        "support.processes.kill_conversion",
        str(source),
        str(target),
        place,
        str(count),
        json.dumps(OPTIONS | options),
    ]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


@pytest.mark.parametrize(
    ("place", "count"), [("data", 30), *(pytest.param(*more, marks=pytest.mark.long) for more in (("line", 9), ("clean", 2)))]
)
def test_killed_it_ends_in_the_same_bytes(source: Path, expected: dict[str, bytes], tmp_path: Path, place: str, count: int) -> None:
    assert killed(source, tmp_path / "out", place, count)
    if place == "clean":  # already published
        assert contents(tmp_path / "out") == expected
        return
    assert not (tmp_path / "out").exists()
    report = convert(source, tmp_path / "out", **OPTIONS)
    assert any("continued" in note for note in report.notes)
    assert contents(tmp_path / "out") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_killed_ten_times_in_a_row(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    chosen = random.Random(7)
    for _ in range(10):
        place = chosen.choice(["data", "line", "recorded"])
        assert killed(source, tmp_path / "out", place, chosen.randrange(1, 5)) or (tmp_path / "out").exists()
    if not (tmp_path / "out").exists():
        assert killed(source, tmp_path / "out", "publish", 0)
        convert(source, tmp_path / "out", **OPTIONS)
    assert contents(tmp_path / "out") == expected


class Interrupt:
    """Raises an error before the `count`-th tensor is written, and counts written tensors."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, error: BaseException | None = None) -> None:
        self.written: list[str] = []
        original = tensors._write

        def write(checkpoint: Any, output: Any, *rest: Any) -> float:
            if error and len(self.written) == count:
                raise error
            self.written.append(output.name)
            return original(checkpoint, output, *rest)

        patch.setattr(tensors, "_write", write)


@pytest.mark.parametrize("count", [1, 9, 20])
def test_ctrl_c_keeps_what_is_done(
    source: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with monkeypatch.context() as patch:
        Interrupt(patch, count, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", **OPTIONS)
    counted = Interrupt(monkeypatch, 0)
    report = convert(source, tmp_path / "out", **OPTIONS)
    assert len(counted.written) == len(report.tensors) - count
    assert contents(tmp_path / "out") == expected


def test_the_report_of_a_continued_run_is_that_of_a_whole_one(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(source, tmp_path / "whole", **OPTIONS)
    with monkeypatch.context() as patch:
        Interrupt(patch, 12, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", **OPTIONS)
    again = convert(source, tmp_path / "out", **OPTIONS)
    assert again.tensors == whole.tensors
    assert (again.nbytes, again.parameters) == (whole.nbytes, whole.parameters)


def test_a_full_disk_can_be_continued_from(
    source: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 25
    original = writer._write_at

    def full(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_at", full)
        with pytest.raises(DestinationError, match=r"No space left on device; what is done stays in .*: make room and give the same"):
            convert(source, tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", **OPTIONS)
    assert contents(tmp_path / "out") == expected


def test_what_was_weighed_is_not_weighed_again(
    source: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = stream._WatchedReader._pass

    def read_block(self: stream._WatchedReader, *rest: Any) -> None:
        read.append(self.parts)
        if len(read) == 2:
            raise KeyboardInterrupt
        original(self, *rest)

    monkeypatch.setattr(stream._WatchedReader, "_pass", read_block)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", **OPTIONS)
    convert(source, tmp_path / "out", **OPTIONS)
    assert read == [2, 3, 3]
    assert contents(tmp_path / "out") == expected


def test_other_options_begin_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Interrupt(patch, 5, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", **OPTIONS)
    report = convert(source, tmp_path / "out", **OPTIONS | {"bits": 3})
    assert "an interrupted run was not continued: bits was 4 and is 3" in report.notes
    convert(source, tmp_path / "directly", **OPTIONS | {"bits": 3})
    assert contents(tmp_path / "out") == contents(tmp_path / "directly")


def test_another_source_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_directory(tmp_path / "source", "mistral")
    with monkeypatch.context() as patch:
        Interrupt(patch, 5, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", **OPTIONS)
    status = (source / "model.safetensors").stat()
    os.utime(source / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    report = convert(source, tmp_path / "out", **OPTIONS)
    assert "an interrupted run was not continued: model.safetensors has changed" in report.notes


@pytest.mark.parametrize("change", ["touched", "replaced", "header"])
def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    source = tiny_directory(tmp_path / "source", "mistral")
    file = source / "model.safetensors"
    recorded = Journal.record

    def record(self: Journal, unit: str, *rest: Any) -> None:
        recorded(self, unit, *rest)
        if self.count == 8:
            status = file.stat()
            if change == "touched":
                os.utime(file)
            elif change == "replaced":
                (source / "new").write_bytes(file.read_bytes())
                (source / "new").replace(file)
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            else:  # with the old modification time
                with file.open("r+b") as opened:
                    opened.seek(20)
                    opened.write(b"#")
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    monkeypatch.setattr(Journal, "record", record)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while it was converted"):
        convert(source, tmp_path / "out", **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
