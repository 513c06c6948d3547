"""The speed of a disk is that of reads at random places of a file."""

from __future__ import annotations

import fcntl

from mlxinfer.expert_offload.disk_speed import read_speed


def test_a_file_is_read(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * 16384))
    speed = read_speed(file, 10_000, seconds=0.03)
    assert speed is not None
    assert speed > 0


def test_a_file_system_without_direct_reads(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 * 16384))
    asked = []

    def refuse(descriptor, command, *more):
        asked.append(command)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert read_speed(file, 16384, seconds=0.03) > 0
    assert asked


def test_small_and_missing_files_tell_nothing(tmp_path):
    (tmp_path / "small").write_bytes(bytes(16384 * 15))
    assert read_speed(tmp_path / "small", 16384) is None
    assert read_speed(tmp_path / "missing", 16384) is None
