from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxinfer.convert.write.destination import check_destination, check_room, made_parents, staged
from mlxinfer.errors import DestinationError


def test_it_appears_whole(tmp_path: Path) -> None:
    with staged(tmp_path / "out", {}) as staging:
        (staging.files / "x").write_text("1")
        assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "x").read_text() == "1"
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_or_not_at_all(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with staged(tmp_path / "out", {}) as staging:
            (staging.files / "x").write_text("1")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_runs_full(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="No space left on device"), staged(tmp_path / "out", {}):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_appears_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="appeared"), staged(tmp_path / "out", {}):
        (tmp_path / "out").mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


def test_checks(tmp_path: Path) -> None:
    check_destination(tmp_path / "out")
    check_room(tmp_path / "out", 1000)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    for name in ("there", "link", "file"):
        with pytest.raises(DestinationError, match="exists"):
            check_destination(tmp_path / name)
    with pytest.raises(DestinationError, match="file is not a directory"):
        check_destination(tmp_path / "file" / "out")
    with pytest.raises(DestinationError, match=r"needs 1000000000\.00 GB"):
        check_room(tmp_path / "out", 10**18)


def test_parents_are_created_and_stay_only_with_something_in_them(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    check_destination(out)
    check_room(out, 1000)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), made_parents(out), staged(out, {}):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with made_parents(out), staged(out, {}) as staging:
        (staging.files / "x").write_text("1")
    assert (out / "x").read_text() == "1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DestinationError, match="not writable"):
            check_destination(tmp_path / "out")
    finally:
        tmp_path.chmod(0o700)
