"""A prefix cache on disk that is used again when its folder is, and folders that are not ours to use."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines.disk_entries import ROOT, content, entry, settle

from mlxinfer.cache.disk import page_dir
from mlxinfer.cache.disk.storage import DiskStorage

CHAIN = [entry(number) for number in range(4)]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def tier(tmp_path: Path, notes: list[str]) -> Iterator[DiskStorage]:
    made = DiskStorage(tmp_path / "prefix", 10**9, note=notes.append)
    yield made
    made.close()


def write(tier: DiskStorage) -> None:
    for one in CHAIN:
        tier.write(one, content(one))
    settle(tier)


def present(tier: DiskStorage) -> list[bool]:
    tier.opened(ROOT)
    settle(tier)
    return [tier.has(ROOT, one.file) for one in CHAIN]


def test_a_full_disk_that_has_room_again(tier: DiskStorage, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write(tier)
    assert present(tier) == [True] * 4
    with monkeypatch.context() as full:
        full.setattr(page_dir, "_SPARE", 1 << 60)
        tier.write(entry(9), content(entry(9)))
        settle(tier)
        assert tier.off
        assert len(notes) == 1
        for _ in range(3):  # still full: tried again, and not said again
            tier._retry_at = 0.0
            assert not tier.off
            tier.write(entry(9), content(entry(9)))
            settle(tier)
            assert tier.off
        assert len(notes) == 1
    assert tier.off  # its time has not come
    tier._retry_at = 0.0
    assert present(tier) == [True] * 4
    write(tier)
    assert not tier.off
    with monkeypatch.context() as full:
        full.setattr(page_dir, "_SPARE", 1 << 60)
        tier.write(entry(9), content(entry(9)))
        settle(tier)
    assert len(notes) == 2


def test_a_folder_that_is_made_again(tier: DiskStorage, tmp_path: Path) -> None:
    write(tier)
    folder = tmp_path / "prefix"
    folder.rename(tmp_path / "away")
    write(tier)
    assert tier.off
    (tmp_path / "away").rename(folder)
    tier._retry_at = 0.0
    assert present(tier) == [True] * 4


def test_a_link_is_refused_and_its_target_is_left_alone(tmp_path: Path, notes: list[str]) -> None:
    target = tmp_path / "photos"
    target.mkdir(mode=0o755)
    (target / "one").touch()
    (tmp_path / "prefix").symlink_to(target)
    tier = DiskStorage(tmp_path / "prefix", 10**9, note=notes.append)
    settle(tier)
    assert notes == [f"the prefix cache on disk is off: {tmp_path / 'prefix'}: it is a link: name the folder that it leads to"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert tier.off
    tier.close()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_dir.os, "geteuid", lambda: os.getuid() + 1)
    tier = DiskStorage(tmp_path / "prefix", 10**9, note=notes.append)
    settle(tier)
    assert tier.off
    assert notes[0].endswith("it belongs to another user")
    write(tier)
    assert not list((tmp_path / "prefix").iterdir())
    tier.close()
