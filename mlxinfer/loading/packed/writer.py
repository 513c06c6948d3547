"""Writes packed copies, when nobody waits for the processor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import mlx.core as mx

from ... import kernels_cpu
from .background import later
from .layout import Plan, Source, plan
from .place import SUFFIX, UNFINISHED, make_room

_DELAY_S = 2.0
"""After loading: whoever waits for a first answer has it by then."""
_PIECE = 4 << 20


def write_later(path: Path, source: Source, matrices: Mapping[str, mx.array]) -> None:
    """`write` in the background. The process does not end before: a copy that a short program leaves behind serves the next one."""

    def work() -> None:
        # No room, no permission, no such file system: the next start packs again, as this one did.
        with suppress(OSError):
            write(path, source, matrices)

    later(work, delay_s=_DELAY_S, nice=19, whole=True)


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
