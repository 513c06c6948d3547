"""Reading and writing in the background, and a disk that fails: nothing raises, and it is said once."""

import os
import shutil
import threading

import numpy as np
import pytest
from support.engines.disk_entries import BIG, ROOT, content, digest, entry, path_of, settle

from mlxinfer.cache.disk import backend as source
from mlxinfer.cache.disk import page_dir as folders
from mlxinfer.cache.disk import storage as tiers
from mlxinfer.cache.disk.storage import DiskStorage

CHAIN = [entry(number) for number in range(12)]


@pytest.fixture
def open_tier(tmp_path):
    """Makes tiers that are closed in the end."""
    made = []

    def make(limit=10**9, directory=tmp_path, **settings):
        made.append(DiskStorage(directory, limit, **settings))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def looked_up(tier):
    while not tier.opened(ROOT):
        pass
    return tier


def has(tier, one):
    return tier.has(one.root, one.file)


def fill(tier, entries=CHAIN):
    for one in entries:
        tier.write(one, content(one))


def written(tier, entries=CHAIN):
    """The same, and they are all on disk."""
    fill(tier, entries)
    settle(tier)


def arrivals(tier):
    found = []
    while tier.reading:
        tier.wait(10)
        while arrival := tier.take():
            for one, row in zip(arrival.entries, arrival.data, strict=True):
                assert np.array_equal(row, content(one))
                found.append(one)
    return found


def test_what_was_written_is_there_after_a_restart(open_tier):
    tier = looked_up(open_tier())
    assert not has(tier, CHAIN[0])
    fill(tier)
    assert all(has(tier, one) for one in CHAIN)
    assert tier.close(60)
    assert tier.off
    assert not tier.note
    tier = looked_up(open_tier())
    assert all(has(tier, one) for one in CHAIN)
    assert not has(tier, entry(99))
    assert not tier.has(digest(5), CHAIN[0].file)
    assert [name.digest for name in tier.behind(ROOT, CHAIN[3].digest)] == [CHAIN[4].file.digest]
    tier.read([CHAIN[:5], CHAIN[5:6], CHAIN[6:]])
    assert arrivals(tier) == CHAIN


def test_what_is_written_before_the_lookup_is_known_after_it(open_tier):
    tier = open_tier()
    fill(tier)
    assert all(has(looked_up(tier), one) for one in CHAIN)


@pytest.mark.parametrize("bad", [0, 3, 5, 6, 11])
def test_reading_ends_at_what_is_not_there(open_tier, tmp_path, bad):
    tier = looked_up(open_tier())
    fill(tier)
    tier.close(60)
    path = path_of(tmp_path, CHAIN[bad])
    path.write_bytes(path.read_bytes()[:-1])
    tier = looked_up(open_tier())
    tier.read([CHAIN[:4], CHAIN[4:8], CHAIN[8:]])
    tier.read([CHAIN[:1]])
    expected = CHAIN[:bad] + (CHAIN[:1] if bad else [])
    assert arrivals(tier) == expected
    assert not has(tier, CHAIN[bad])
    assert not path.exists()


def test_no_more_is_read_ahead_than_may_wait(open_tier, monkeypatch):
    monkeypatch.setattr(source, "_ARRIVED", 3 * CHAIN[0].layout.nbytes)
    tier = looked_up(open_tier())
    written(tier)
    tier.read([[one] for one in CHAIN])
    found = []
    while tier.reading:
        tier.wait(10)
        assert sum(len(a.entries) for a in tier._arrived) <= 3
        if arrival := tier.take():
            found += arrival.entries
    assert found == CHAIN


def test_no_more_waits_to_be_written_than_may(open_tier, monkeypatch):
    held = threading.Event()
    write = folders.PageDir.write
    monkeypatch.setattr(folders.PageDir, "write", lambda *args: held.wait(60) and write(*args))
    monkeypatch.setattr(tiers, "_WRITING", 3 * CHAIN[0].layout.nbytes)
    tier = looked_up(open_tier())
    count = 0
    while tier.takes(CHAIN[0].layout.nbytes):
        fill(tier, [CHAIN[count]])
        count += 1
    assert count == 3
    held.set()
    assert tier.close(60)


def test_closing_waits_only_so_long(open_tier, monkeypatch):
    held = threading.Event()
    done = []
    monkeypatch.setattr(folders.PageDir, "write", lambda self, one, data: (held.wait(60) and done.append(one)) or True)
    tier = looked_up(open_tier())
    fill(tier)
    assert not tier.close(0.01)
    held.set()
    assert tier._writer.close(60)
    assert len(done) <= 1


def test_closing_while_something_is_read(open_tier):
    tier = looked_up(open_tier())
    written(tier)
    tier.read([[one] for one in CHAIN])
    tier.close(60)
    assert not tier.reading
    assert tier.take() is None
    tier.wait(60)


def test_what_was_evicted_is_not_there(open_tier):
    numbers = range(100)
    size = len(CHAIN[0].head(0)) + BIG.nbytes
    tier = looked_up(open_tier(limit=30 * size))
    fill(tier, [entry(n, layout=BIG) for n in numbers])
    tier._writer.close(60)
    left = [n for n in numbers if has(tier, entry(n, layout=BIG))]
    assert 15 < len(left) <= 30
    assert left == [n for n in numbers if path_of(tier._folder.directory, entry(n, layout=BIG)).exists()]


def failing(open_tier, spoil):
    """The notes of a tier whose writing fails."""
    notes = []
    tier = looked_up(open_tier(note=notes.append))
    fill(tier, CHAIN[:1])
    tier._writer.add(spoil)
    fill(tier, CHAIN[1:])
    tier._writer.close(60)
    assert tier.off
    assert notes == [tier.note]
    assert not has(tier, CHAIN[0])
    assert tier.behind(ROOT, CHAIN[0].parent) == []
    assert not tier.takes(1)
    assert tier.opened(digest(77))
    tier.read([CHAIN])
    assert arrivals(tier) == []
    return tier.note


def test_no_space_is_said_once(open_tier, monkeypatch):
    assert "GiB would be left" in failing(open_tier, lambda: monkeypatch.setattr(folders, "_SPARE", 1 << 60))


def test_a_directory_that_vanished_is_said_once(open_tier, tmp_path):
    assert "No such file" in failing(open_tier, lambda: shutil.rmtree(tmp_path))


@pytest.mark.parametrize("kind", ["a file", "below a file", "of another"])
def test_a_directory_that_cannot_be_made(open_tier, tmp_path, kind, monkeypatch):
    notes = []
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "below" if kind == "below a file" else tmp_path / "file"
    if kind == "of another":
        directory = tmp_path / "new"

        def refused(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "fchmod", refused)
    tier = looked_up(open_tier(directory=directory, note=notes.append))
    fill(tier)
    tier._writer.close(60)
    assert notes == [tier.note]
    assert str(directory) in tier.note
    assert "\n" not in tier.note
