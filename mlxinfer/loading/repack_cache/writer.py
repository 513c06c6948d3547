"""Writes a packed copy piece by piece, and records its progress so that a later process resumes it.

The record stands where the finished copy will have its header. Without it, a short process would spend its time comparing what other
processes have written. The record is trusted, because a finished copy's checksums are verified before its first use.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path

import mlx.core as mx

from ... import kernels_cpu
from ...util.background import Stop
from ...util.cache_files import UNFINISHED, locked, mark_safe
from ...util.dataclass import dataclass
from .layout import CopyLayout, Source, make_room, plan, read_places

_PIECE = 1 << 20
"""Bytes written at a time: a millisecond or two."""
_RECORDED = 8 * _PIECE
"""Bytes of a matrix between two records of the progress."""
_RECORD = struct.Struct("<8sII")
"""Magic, bytes of the record in JSON, their CRC-32."""
_MAGIC = b"mlxipart"


@dataclass(slots=True)
class WriteProgress:
    """Parts of a copy that its unfinished file has."""

    layout: int
    """Checksum of the source and the places of all matrices. A record of another layout does not count."""
    done: dict[str, int] = field(default_factory=dict)
    """CRC-32 of each whole matrix with its preamble, by key."""
    key: str = ""
    """Key of the matrix that was being written, or empty."""
    nbytes: int = 0
    """Bytes of that matrix that are written."""
    checksum: int = 0
    """CRC-32 of the preamble and these bytes."""

    @classmethod
    def read(cls, descriptor: int, planned: CopyLayout) -> WriteProgress:
        """Read the record of the file. A record of another layout gives no progress. Raises OSError."""
        found = cls(layout_of(planned))
        magic, size, checksum = _RECORD.unpack(os.pread(descriptor, _RECORD.size, 0).ljust(_RECORD.size, b"\0"))
        text = os.pread(descriptor, size, _RECORD.size) if magic == _MAGIC and size < planned.base else b""
        if not text or zlib.crc32(text) != checksum:
            return found
        layout, done, key, nbytes, partial = json.loads(text)
        ends = [planned.offsets[name] + planned.sizes[name] for name in done] if layout == found.layout else []
        if key and layout == found.layout:
            ends.append(planned.offsets[key] + nbytes)
        if layout != found.layout or max(ends, default=0) > os.fstat(descriptor).st_size:
            return found
        return cls(layout, done, key, nbytes, partial)

    def write(self, descriptor: int, planned: CopyLayout) -> None:
        """Replace the record, which is shorter than the header and index of the finished copy. Raises OSError."""
        text = json.dumps([self.layout, self.done, self.key, self.nbytes, self.checksum]).encode()
        record = _RECORD.pack(_MAGIC, len(text), zlib.crc32(text)) + text
        if len(record) <= planned.base:
            os.pwrite(descriptor, record, 0)


def layout_of(planned: CopyLayout) -> int:
    """A checksum of everything that a record depends on."""
    return zlib.crc32(planned.head(dict.fromkeys(planned.sizes, 0)))


class CopyWriter:
    """Writes a copy piece by piece. A further call, or a later process, resumes it.

    An unfinished copy stays in `NAME.part`, with a record of its progress. The next load of the model packs the same bytes and writes the
    missing ones.
    """

    def __init__(self, path: Path, source: Source, matrices: Mapping[str, mx.array]) -> None:
        self._path, self._matrices = path, matrices
        self._plan = plan(source, {key: data.nbytes for key, data in matrices.items()})
        self._steps = self._write()
        self.done = False
        """True once the copy exists, though perhaps not on the disk yet. Until it is, each load verifies the checksums."""

    def in_background(self, stop: Stop) -> None:
        self(stop)
        if self.done and not stop():
            with suppress(OSError):
                mark_safe(self._path)

    def __call__(self, stop: Stop) -> None:
        # Without space or permission the next start packs again, as this one did.
        with suppress(OSError):
            while not stop() and next(self._steps, None) is not None:
                pass

    def _write(self) -> Iterator[bool]:
        """Replace the copy if there is room. Other processes see the old one or the whole new one. Yields after each piece."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not make_room(self._plan.size, instead_of=self._path):
            return
        unfinished = self._path.with_suffix(UNFINISHED)
        with locked(unfinished) as descriptor:
            if descriptor is None:
                return
            if _is_whole(self._path, self._plan):
                os.unlink(unfinished)
                return
            try:
                os.ftruncate(descriptor, min(os.fstat(descriptor).st_size, self._plan.size))
                progress = WriteProgress.read(descriptor, self._plan)
                for key, data in self._matrices.items():
                    if key not in progress.done:
                        yield from self._write_matrix(descriptor, key, memoryview(data).cast("B"), progress)  # type: ignore[arg-type]
                os.ftruncate(descriptor, self._plan.size)
                os.pwrite(descriptor, self._plan.head(progress.done), 0)
                os.replace(unfinished, self._path)
            except OSError:
                with suppress(OSError):
                    os.unlink(unfinished)
                raise
            self.done = True

    def _write_matrix(self, descriptor: int, key: str, content: memoryview, progress: WriteProgress) -> Iterator[bool]:
        """Continue at `progress`, and update it."""
        at, preamble = self._plan.offsets[key], kernels_cpu.preamble(len(content))
        if progress.key != key:
            os.pwrite(descriptor, preamble, at - len(preamble))
            progress.key, progress.nbytes, progress.checksum = key, 0, zlib.crc32(preamble)
        for begin in range(progress.nbytes, len(content), _PIECE):
            piece = content[begin : begin + _PIECE]
            os.pwrite(descriptor, piece, at + begin)
            progress.checksum = zlib.crc32(piece, progress.checksum)
            progress.nbytes = begin + len(piece)
            if progress.nbytes % _RECORDED == 0:
                progress.write(descriptor, self._plan)
            yield True
        progress.done[key] = progress.checksum
        progress.key = ""
        progress.write(descriptor, self._plan)


def _is_whole(path: Path, planned: CopyLayout) -> bool:
    """True if another process has written the same copy meanwhile."""
    with suppress(OSError), path.open("rb") as file:
        places = read_places(file, os.fstat(file.fileno()).st_size, planned.source)
        return places is not None and places.keys() >= planned.offsets.keys()
    return False
