"""The directory: its cap, what goes first, what is left behind, and other processes in it."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines.disk_entries import BIG, ROOT, content, digest, entry, path_of

from mlxinfer.cache.disk import page_dir as folders
from mlxinfer.cache.disk.page_dir import UNFINISHED, PageDir

SIZE = BIG.nbytes + len(entry(1, layout=BIG).head(0))


def page(number: int, **settings):
    return entry(number, layout=BIG, **settings)


def prepared(directory, limit=10**9):
    folder = PageDir(directory, limit)
    folder.prepare()
    return folder


def taken(directory):
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def kept(folder, numbers, **settings):
    """Return those of the pages that can be read and are correct."""
    found = set()
    for number in numbers:
        one = page(number, **settings)
        data = np.empty(one.layout.nbytes, np.uint8)
        if folder.read(one, data):
            assert np.array_equal(data, content(one))
            found.add(number)
    return found


def used_at(folder, one, when):
    os.utime(path_of(folder.directory, one), (when, when))


def test_the_cap_holds_over_all_roots(tmp_path):
    folder = prepared(tmp_path, limit=20 * SIZE)
    for number in range(60):
        root = digest(1000 + number % 3)
        assert folder.write(page(number, root=root), content(page(number, root=root)))
        assert taken(tmp_path) <= 20 * SIZE
    assert taken(tmp_path) > 15 * SIZE
    removed = folder.removed()
    assert len(removed) + taken(tmp_path) // SIZE == 60
    assert not folder.removed()


def test_what_is_larger_than_its_share_is_not_kept(tmp_path):
    folder = prepared(tmp_path, limit=7 * SIZE)
    assert not folder.write(page(1), content(page(1)))
    assert not taken(tmp_path)


def test_the_end_of_a_chain_goes_before_its_beginning(tmp_path):
    folder = prepared(tmp_path, limit=20 * SIZE)
    for number in range(16):
        folder.write(page(number), content(page(number)))
        used_at(folder, page(number), 1000 + number)
    for number in range(100, 106):
        folder.write(page(number), content(page(number)))
    left = kept(folder, range(16))
    assert left == set(range(len(left)))
    assert 0 < len(left) < 16
    assert kept(folder, range(100, 106)) == set(range(100, 106))


def test_a_chain_that_was_used_stays(tmp_path):
    folder = prepared(tmp_path, limit=20 * SIZE)
    for start in (0, 100):
        for number in range(start, start + 8):
            folder.write(page(number), content(page(number)))
            used_at(folder, page(number), 1000 + number)
    folder.mark_used(ROOT, page(7).file)
    for number in range(200, 208):
        folder.write(page(number), content(page(number)))
    assert kept(folder, range(8)) == set(range(8))
    assert len(kept(folder, range(100, 108))) < 8


def test_a_chain_is_not_cut_for_its_own_end(tmp_path):
    folder = prepared(tmp_path, limit=20 * SIZE)
    folder.write(page(100), content(page(100)))
    written = 0
    while folder.write(page(written), content(page(written))):
        written += 1
    assert 18 <= written <= 20
    assert kept(folder, range(30)) == set(range(written))
    assert not kept(folder, [100])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 9)), max_size=30))
def test_every_file_can_be_removed_however_names_refer_to_each_other(found):
    from pathlib import Path

    files = [
        folders._File(Path("root") / f"{own}-{i}", folders.Name(str(own), str(parent), "full"), when, 1)
        for i, (own, parent, when) in enumerate(found)
    ]
    order = list(folders._leaves_first(files))
    assert sorted(f.path for f in order) == sorted(f.path for f in files)


def test_two_of_them_share_a_directory(tmp_path):
    both, written = [prepared(tmp_path, limit=40 * SIZE) for _ in range(2)], []
    starts = range(0, 600, 10)

    def write(folder):
        written.extend(folder.write(page(start), content(page(start))) for start in (*starts, *starts))

    threads = [threading.Thread(target=write, args=[folder]) for folder in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == [True] * 240
    assert taken(tmp_path) <= 40 * SIZE
    assert kept(both[0], starts)
    assert not list(tmp_path.rglob(f"*{UNFINISHED}"))


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path):
    import fcntl

    folder = prepared(tmp_path)
    folder.write(page(1), content(page(1)))
    dead, alive = (tmp_path / ROOT.hex() / f"{name}{UNFINISHED}" for name in ("dead", "alive"))
    dead.write_bytes(b"half")
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        folder.prepare()
        assert alive.exists()
        assert not dead.exists()
    folder.prepare()
    assert not alive.exists()
    assert kept(folder, [1]) == {1}


def test_no_space(tmp_path, monkeypatch):
    folder = prepared(tmp_path)
    write, written = os.write, []

    def full(descriptor, data):
        if sum(written) > SIZE // 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(write(descriptor, data[:4096]))
        return written[-1]

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        folder.write(page(1), content(page(1)))
    monkeypatch.undo()
    assert not taken(tmp_path)
    assert folder.write(page(1), content(page(1)))


def test_the_last_of_the_disk_is_left_to_others(tmp_path, monkeypatch):
    folder = prepared(tmp_path)
    monkeypatch.setattr(folders, "_SPARE", 1 << 60)
    with pytest.raises(OSError, match="GiB would be left"):
        folder.write(page(1), content(page(1)))
    assert not taken(tmp_path)


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.engines.disk_entries import BIG, content, entry
from mlxinfer.cache.disk.page_dir import PageDir
folder = PageDir(Path(sys.argv[1]), 10**9)
folder.prepare()
print("ready", flush=True)
number = 0
while True:
    one = entry(number % 50, layout=BIG)
    folder.write(one, content(one))
    number += 1
"""


def writer(directory, **settings):
    script = WRITER.format(tests=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **settings,
    )


@pytest.mark.parametrize("wanted", [1, 2, 5, 17, 43])
def test_a_writer_is_killed(tmp_path, wanted):
    """At a moment that is some other one in every run; what counts is that it writes without pause."""
    with writer(tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        while sum(1 for _ in tmp_path.rglob("*.safetensors")) < wanted:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = sum(1 for _ in tmp_path.rglob("*.safetensors"))
    folder = prepared(tmp_path)
    assert not list(tmp_path.rglob(f"*{UNFINISHED}"))
    assert len(kept(folder, range(50))) == before >= wanted


def test_a_limit_of_the_system_on_files(tmp_path):
    """A real refusal in the middle of a file, by the kernel."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))

    with writer(tmp_path, preexec_fn=limited) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "File too large" in errors
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
