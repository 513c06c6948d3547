"""Writes packed copies, when nobody waits for the processor."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import mlx.core as mx

from ... import kernels_cpu
from .layout import Plan, Source, plan
from .place import SUFFIX, UNFINISHED, make_room

_DELAY_S = 2.0
"""After loading: whoever waits for a first answer has it by then."""
_TURN_S = 0.05
_PIECE = 4 << 20


class _Writer(threading.Thread):
    """The process does not end before it has finished: a copy that a short program leaves behind serves the next one."""

    def __init__(self, path: Path, source: Source, matrices: Mapping[str, mx.array]) -> None:
        super().__init__(name="mlxinfer-packed")
        self._path, self._source = path, source
        self._matrices: Mapping[str, mx.array] = matrices
        self.now = threading.Event()

    def run(self) -> None:
        waited = 0.0
        # The main thread counts as ended once the program has, while this one still runs.
        while waited < _DELAY_S and threading.main_thread().is_alive() and not self.now.wait(_TURN_S):
            waited += _TURN_S
        _give_way()
        matrices, self._matrices = self._matrices, {}
        # No room, no permission, no such file system: the next start packs again, as this one did.
        with suppress(OSError):
            write(self._path, self._source, matrices)


_writers: list[_Writer] = []
_lock = threading.Lock()


def write_later(path: Path, source: Source, matrices: Mapping[str, mx.array]) -> None:
    """`write` in a thread of low priority. What goes wrong there is not told: nothing but time is lost."""
    writer = _Writer(path, source, matrices)
    with suppress(RuntimeError):  # no more threads, or the program ends already
        writer.start()
        with _lock:
            _writers[:] = [other for other in _writers if other.is_alive()] + [writer]


def finish_writing() -> None:
    """Write at once what is to be written, and wait for it."""
    with _lock:
        writers, _writers[:] = list(_writers), []
    for writer in writers:
        writer.now.set()
    for writer in writers:
        writer.join()


def write(path: Path, source: Source, matrices: Mapping[str, mx.array]) -> None:
    """Replace the copy at `path`, if there is room. Readers see the old one or the whole new one. Raises OSError."""
    from tempfile import mkstemp  # slow to import, and seldom needed

    planned = plan(source, {key: data.nbytes for key, data in matrices.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    if not make_room(planned.size, instead_of=path):
        return
    descriptor, unfinished = mkstemp(suffix=UNFINISHED, prefix=path.name.removesuffix(SUFFIX), dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write_all(file, planned, matrices)
            file.flush()
            # Renamed before its content is safe, a file could be there after a power cut, and empty.
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def _write_all(file: IO[bytes], planned: Plan, matrices: Mapping[str, mx.array]) -> None:
    file.write(planned.head)
    for key, data in matrices.items():
        file.write(b"\0" * (planned.offsets[key] - kernels_cpu.ALIGNMENT - file.tell()))
        file.write(kernels_cpu.preamble(data.nbytes))
        content = memoryview(data).cast("B")  # type: ignore[arg-type]  # it is a buffer, and its stubs do not say so
        for at in range(0, len(content), _PIECE):
            file.write(content[at : at + _PIECE])
    file.write(b"\0" * (planned.size - file.tell()))


def _give_way() -> None:
    """On Linux a thread has a priority of its own."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
