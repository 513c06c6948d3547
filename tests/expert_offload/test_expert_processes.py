"""Files of experts and several processes: one writes, the others wait; a killed or interrupted one is continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxinfer.expert_offload import ExpertFile, ExpertFileWriter, ExpertStore
from tests.support.formats.expert_files import SOURCE, layer_arrays, write_experts

WRITE = """
import os, signal, sys
from pathlib import Path
from mlxinfer.expert_offload import ExpertFileWriter
from tests.support.formats.expert_files import SOURCE, layer_arrays
path, stop, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
added = 0
real = os.pwritev
def pwritev(descriptor, slices, offset):
    if added == stop and how == "kill":
        real(descriptor, slices[:1], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    if added == stop and how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    return real(descriptor, slices, offset)
os.pwritev = pwritev
with ExpertFileWriter(path, SOURCE) as writer:
    print("ready", flush=True)
    if how == "wait":
        sys.stdin.readline()
    for layer in range(4):
        if f"layers.{layer}" not in writer.keys:
            writer.add(f"layers.{layer}", layer_arrays(layer, 8), {"index": layer})
            added += 1
    writer.finish().close()
print("added", added)
"""


ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def start(path: Path, stop: int = -1, how: str = "") -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", WRITE, str(path), str(stop), how], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT, cwd=ROOT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.experts"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "a.experts"
    write_experts(path, 4).close()
    return path.read_bytes()


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_a_process_that_is_ended_is_continued(path: Path, whole: bytes, how: str) -> None:
    process = start(path, 2, how)
    assert process.wait(timeout=60) != 0
    process.communicate()
    assert not path.exists()
    with ExpertFileWriter(path, SOURCE) as writer:
        assert writer.keys == {"layers.0", "layers.1"}
    write_experts(path, 4).close()
    assert path.read_bytes() == whole
    assert {each.suffix for each in path.parent.iterdir()} == {".experts", ".checked"}


def test_the_second_process_waits_and_uses_the_file_of_the_first(path: Path, whole: bytes) -> None:
    first = start(path, how="wait")
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    second = start(path)
    assert second.stderr is not None
    assert "another process is writing" in second.stderr.readline()
    assert first.communicate("go on\n", timeout=60)[0] == "added 4\n"
    assert second.communicate(timeout=60)[0] == "ready\nadded 0\n"
    assert path.read_bytes() == whole


def test_the_second_process_continues_after_a_killed_first(path: Path, whole: bytes) -> None:
    with ExpertFileWriter(path, SOURCE) as writer:
        writer.add("layers.0", layer_arrays(0, 8), {"index": 0})
        second = start(path)
        assert second.stderr is not None
        assert "another process is writing" in second.stderr.readline()
    assert second.communicate(timeout=60)[0] == "ready\nadded 3\n"
    assert path.read_bytes() == whole


READ = """
import os, signal, sys
from pathlib import Path
import numpy as np
from mlxinfer.expert_offload import ExpertFile, ExpertStore
from tests.support.formats.expert_files import SOURCE
reads = 0
def read(descriptor, buffers, offset):
    global reads
    reads += 1
    if reads == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.preadv(descriptor, buffers, offset)
store = ExpertStore(ExpertFile.open(Path(sys.argv[1]), SOURCE), 0, read=read)
list(store.pools["layers.0"].waves(np.arange(8)))
"""


def test_a_process_that_is_killed_while_it_reads_leaves_the_file(path: Path, whole: bytes) -> None:
    write_experts(path, 4).close()
    done = subprocess.run([sys.executable, "-c", READ, str(path)], env=ENVIRONMENT, cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    file = ExpertFile.open(path, SOURCE)
    assert file is not None
    file.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("reader", ["the caller", "a thread"])
def test_ctrl_c_while_reading_leaves_the_pool_usable(path: Path, reader: str) -> None:
    go_on = threading.Event()
    interrupts = True

    def read(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        nonlocal interrupts
        is_main = threading.current_thread() is threading.main_thread()
        if interrupts and is_main and reader == "the caller":
            interrupts = False
            signal.raise_signal(signal.SIGINT)
        if interrupts and not is_main and reader == "a thread":
            interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
            go_on.wait(60)
        return os.preadv(descriptor, buffers, offset)

    store = ExpertStore(write_experts(path, 1), 0, slots={"layers.0": 6}, read=read)
    pool = store.pools["layers.0"]
    with pytest.raises(KeyboardInterrupt):
        list(pool.waves(np.arange(6), overlap=False))
    go_on.set()
    expected = np.array(layer_arrays(0, 8)["gate_up.weight"])
    for chosen in (np.arange(6), np.array([7, 1])):
        for slots in pool.waves(chosen):
            assert np.array_equal(np.array(pool.arrays["gate_up.weight"])[slots], expected[chosen])
    store.close()


LIMITED = """
import resource, sys
from pathlib import Path
from mlxinfer.errors import ExpertFileError
from tests.support.formats.expert_files import write_experts
resource.setrlimit(resource.RLIMIT_FSIZE, (200000, resource.RLIM_INFINITY))
try:
    write_experts(Path(sys.argv[1]), 4)
except ExpertFileError as error:
    print(error)
"""


def test_a_file_that_may_not_grow_is_an_error_and_leaves_nothing(path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "cannot write the experts to" in done.stdout, done.stderr
    assert not list(path.parent.iterdir())
