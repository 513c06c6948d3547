"""The packed copy of one GGUF model: what there is of it, and what has to be kept for the next time."""

from __future__ import annotations

import logging
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx

from ... import kernels_cpu
from ...kernels_cpu import Packed, WeightFile
from ...nn.weights import RawBlocks
from ...util.background import Stop, later
from ..files import file_stamp
from ..gguf.files import part_paths
from .layout import (
    UNFINISHED,
    CopyLayout,
    Place,
    Source,
    copy_path,
    is_checked,
    limit_bytes,
    make_room,
    mark_checked,
    plan,
    read_places,
    remove_abandoned,
)
from .progress import WriteProgress

_log = logging.getLogger(__name__)

_WRITE_DELAY_S, _WRITE_NICE = 2.0, 10
"""After loading: the first answer has begun by then."""
_PIECE = 1 << 20
"""Bytes that are written at a time: a millisecond or two."""
_RECORDED = 8 * _PIECE
"""Bytes of a matrix after which the file says how far it is."""
_HUGE_PAGES_DELAY_S, _HUGE_PAGES_NICE = 0.5, 5
"""By then the first token of a small model is there, and a person still reads it."""


class CopyWriter:
    """Writes a copy piece by piece, and goes on where it was when it is called again, or where the process before it stopped.

    What a short process does not finish stays in `NAME.part`, which says how far it is. The next load of the model packs the same bytes,
    and writes those that are missing.
    """

    def __init__(self, path: Path, source: Source, matrices: Mapping[str, mx.array]) -> None:
        self._path, self._matrices = path, matrices
        self._plan = plan(source, {key: data.nbytes for key, data in matrices.items()})
        self._steps = self._write()
        self.done = False
        """Whether the copy is there, though perhaps not on the disk yet: until it is, each load verifies the checksums."""

    def in_background(self, stop: Stop) -> None:
        self(stop)
        if self.done and not stop():
            with suppress(OSError):
                _make_safe(self._path)

    def __call__(self, stop: Stop) -> None:
        # No room, no permission, no such file system: the next start packs again, as this one did.
        with suppress(OSError):
            while not stop() and next(self._steps, None) is not None:
                pass

    def _write(self) -> Iterator[bool]:
        """Replaces the copy if there is room. Other processes see the old one or the whole new one. Yields after each piece."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not make_room(self._plan.size, instead_of=self._path):
            return
        unfinished = self._path.with_suffix(UNFINISHED)
        with _locked(unfinished) as descriptor:
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
        """Continue where `progress` says that a process stopped, and keep it up to date."""
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


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """The descriptor of an unfinished copy that no other process writes; None if one does. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # The process that had the lock may have renamed its file to the finished copy.
        free = _try_lock(descriptor) and path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        yield descriptor if free else None
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    import fcntl  # most starts write nothing

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_whole(path: Path, planned: CopyLayout) -> bool:
    """Whether another process has written the same copy meanwhile."""
    with suppress(OSError), path.open("rb") as file:
        places = read_places(file, os.fstat(file.fileno()).st_size, planned.source)
        return places is not None and places.keys() >= planned.offsets.keys()
    return False


class RepackCache:
    """Implements `nn.packing.Copies` for one model."""

    def __init__(self, path: Path, source: Source, file: WeightFile | None, places: dict[str, Place]) -> None:
        self._path, self._source = path, source
        self._file, self._places = file, places
        self._matrices: dict[str, Packed] = {}
        self._complete = True

    @property
    def found(self) -> bool:
        """Whether there is a copy."""
        return self._file is not None

    def find(self, blocks: RawBlocks, precision: str | None) -> Packed | None:
        """The matrix, if the copy has it."""
        key = _key(blocks)
        place = self._places.get(key)
        if self._file is None or place is None:
            return None
        try:
            packed = kernels_cpu.mapped_gguf(self._file, place.offset, blocks.format.mode, blocks.shape, precision=precision)
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
        if not self._complete:
            writer = CopyWriter(self._path, self._source, {key: packed.data for key, packed in self._matrices.items()})
            later(writer.in_background, at_exit=writer, delay_s=_WRITE_DELAY_S, nice=_WRITE_NICE)
        elif self._file is not None:
            later(self._settle, delay_s=_HUGE_PAGES_DELAY_S, nice=_HUGE_PAGES_NICE)
        self._matrices = {}

    def _settle(self, stop: Stop) -> None:
        assert self._file is not None
        kernels_cpu.into_huge_pages(self._file, stop)
        with suppress(OSError):
            if not stop():
                remove_abandoned()
            if not stop() and not is_checked(self._path):
                _make_safe(self._path)


def _make_safe(path: Path) -> None:
    """Let later loads trust a copy whose checksums this process has verified. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    mark_checked(path)


def open_copies(model: Path) -> RepackCache | None:
    """The copy of the GGUF model at this path, or the room for one. None where matrices are not packed, or nothing is to be kept.

    A file that cannot be read, is not whole, was made from another file or does not have the checksums of its matrices, is no copy.
    """
    version = kernels_cpu.packed_version()
    if version is None or not limit_bytes() or not model.is_file():
        return None
    try:
        source: Source = {"packed": version, "files": [file_stamp(part) for part in part_paths(model)]}
    except OSError:
        return None
    path = copy_path(model)
    try:
        with path.open("rb") as file:
            places = read_places(file, os.fstat(file.fileno()).st_size, source)
            if places is not None and not is_checked(path) and not _has_checksums(file.fileno(), places):
                _log.warning("the packed copy of %s was damaged: it is made again", model.name)
                path.unlink()
                places = None
            mapped = None if places is None else kernels_cpu.map_weights(file.fileno())
    except OSError:
        places = mapped = None
    return RepackCache(path, source, mapped, places or {})


def _has_checksums(descriptor: int, places: Mapping[str, Place]) -> bool:
    """Reads everything: a third of a second for a gigabyte. Raises OSError."""
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as content, memoryview(content) as whole:
        return all(zlib.crc32(whole[p.offset - kernels_cpu.ALIGNMENT : p.offset + p.nbytes]) == p.checksum for p in places.values())


def _key(blocks: RawBlocks) -> str:
    """Which rows of which tensors, in which order and form."""
    names = "+".join(source.tensor for source in blocks.sources)
    return f"{names} {blocks.format.mode} {list(blocks.shape)} {zlib.crc32(blocks.rows.tobytes()):08x}"
