"""The packed copy of one GGUF model: what there is of it, and what has to be kept for the next time."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

import mlx.core as mx

from ... import kernels_cpu
from ...kernels_cpu import Packed, WeightFile
from ...nn.weights import RawBlocks
from ..gguf.files import part_paths
from .background import later
from .layout import SUFFIX, UNFINISHED, Plan, Source, copy_path, limit_bytes, make_room, mark_used, plan, read_offsets

_WRITE_DELAY_S = 2.0
"""After loading: whoever waits for a first answer has it by then."""
_PIECE = 4 << 20


def write_later(path: Path, source: Source, matrices: Mapping[str, mx.array]) -> None:
    """`write` in the background. The process does not end before: a copy that a short program leaves behind serves the next one."""

    def work() -> None:
        # No room, no permission, no such file system: the next start packs again, as this one did.
        with suppress(OSError):
            write(path, source, matrices)

    later(work, delay_s=_WRITE_DELAY_S, nice=19, whole=True)


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


_HUGE_PAGES_DELAY_S, _NICE = 0.5, 5
"""By then the first token of a small model is there, and a person still reads it."""


class RepackCache:
    """Implements `nn.packing.Copies` for one model."""

    def __init__(self, path: Path, source: Source, file: WeightFile | None, offsets: dict[str, int]) -> None:
        self._path, self._source = path, source
        self._file, self._offsets = file, offsets
        self._matrices: dict[str, Packed] = {}
        self._complete = True

    @property
    def found(self) -> bool:
        """Whether there is a copy."""
        return self._file is not None

    def find(self, blocks: RawBlocks, precision: str | None) -> Packed | None:
        """The matrix, if the copy has it."""
        key = _key(blocks)
        offset = self._offsets.get(key)
        if self._file is None or offset is None:
            return None
        try:
            packed = kernels_cpu.mapped_gguf(self._file, offset, blocks.format.mode, blocks.shape, precision=precision)
        except ValueError:
            return None
        self._matrices[key] = packed
        return packed

    def add(self, blocks: RawBlocks, packed: Packed) -> None:
        self._matrices[_key(blocks)] = packed
        self._complete = False

    def keep(self) -> None:
        """In the background, write a copy that has all matrices, unless there is one, or make the one that is in use faster. Ends the
        use of this object."""
        if self._complete and self._file is not None:
            later(partial(kernels_cpu.into_huge_pages, self._file), delay_s=_HUGE_PAGES_DELAY_S, nice=_NICE, whole=False)
        if not self._complete:
            write_later(self._path, self._source, {key: packed.data for key, packed in self._matrices.items()})
        self._matrices = {}


def open_copies(model: Path) -> RepackCache | None:
    """The copy of the GGUF model at this path, or the room for one. None where matrices are not packed, or nothing is to be kept.

    What cannot be read, is not whole, or was made from another file, is no copy.
    """
    version = kernels_cpu.packed_version()
    if version is None or not limit_bytes() or not model.is_file():
        return None
    try:
        source: Source = {"packed": version, "files": [_file(part) for part in part_paths(model)]}
    except OSError:
        return None
    path = copy_path(model)
    try:
        with path.open("rb") as file:
            offsets = read_offsets(file, os.fstat(file.fileno()).st_size, source)
            mapped = None if offsets is None else kernels_cpu.map_weights(file.fileno())
    except OSError:
        offsets = mapped = None
    if mapped is not None:
        mark_used(path)
    return RepackCache(path, source, mapped, offsets or {})


def _file(path: Path) -> list[str | int]:
    """Changes when the file does: the last number even where it is overwritten and given its old time back."""
    found = path.stat()
    return [os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _key(blocks: RawBlocks) -> str:
    """Which rows of which tensors, in which order and form."""
    names = "+".join(source.tensor for source in blocks.sources)
    return f"{names} {blocks.format.mode} {list(blocks.shape)} {zlib.crc32(blocks.rows.tobytes()):08x}"
