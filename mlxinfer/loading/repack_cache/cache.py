"""The packed copy of one GGUF model: the matrices it has, and those to write for the next start."""

from __future__ import annotations

import logging
import mmap
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ... import kernels_cpu
from ...kernels_cpu import Packed, WeightFile
from ...nn.weights import RawBlocks
from ...util.background import Stop, later
from ...util.cache_files import is_checked, mark_safe, remove_abandoned
from ...util.plain_file import file_stamp
from ..gguf.files import part_paths
from .layout import Place, Source, copy_path, directory, limit_bytes, read_places
from .writer import CopyWriter

_log = logging.getLogger(__name__)

_WRITE_DELAY_S, _WRITE_NICE = 2.0, 10
"""After loading: the first answer has started by then."""
_HUGE_PAGES_DELAY_S, _HUGE_PAGES_NICE = 0.5, 5
"""By then a small model has answered its first token."""


class RepackCache:
    """Implements `nn.packing.Copies` for one model."""

    def __init__(self, path: Path, source: Source, file: WeightFile | None, places: dict[str, Place]) -> None:
        self._path, self._source = path, source
        self._file, self._places = file, places
        self._matrices: dict[str, Packed] = {}
        self._complete = True

    @property
    def found(self) -> bool:
        """True if there is a copy."""
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
        """Schedule background work and end the use of this object: write a copy with all matrices, or speed up the mapped copy."""
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
                remove_abandoned(directory())
            if not stop() and not is_checked(self._path):
                mark_safe(self._path)


def open_copies(model: Path) -> RepackCache | None:
    """Open the copy of the GGUF model at this path, or prepare a new one. None if matrices are not packed, or copies are disabled.

    A file that is unreadable, truncated, made from another file, or has a wrong checksum counts as absent.
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
    """Read the whole copy and compare checksums: a third of a second per gigabyte. Raises OSError."""
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as content, memoryview(content) as whole:
        return all(zlib.crc32(whole[p.offset - kernels_cpu.ALIGNMENT : p.offset + p.nbytes]) == p.checksum for p in places.values())


def _key(blocks: RawBlocks) -> str:
    """Name the rows, their tensors, their order and their form."""
    names = "+".join(source.tensor for source in blocks.sources)
    return f"{names} {blocks.format.mode} {list(blocks.shape)} {zlib.crc32(blocks.rows.tobytes()):08x}"
