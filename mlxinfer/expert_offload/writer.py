"""Writes a file of experts, one layer at a time. A later process continues what an interrupted one has written."""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ExpertFileError
from ..util.cache_dir import cache_dir
from ..util.cache_files import UNFINISHED, cached_path, files_with_suffix, locked, mark_safe, remove_abandoned, remove_least_recent
from ..util.uncached_file import PAGE, drop_pages
from .file_format import (
    ArraySpec,
    ExpertFile,
    LayerRecord,
    Source,
    encode_header,
    encode_layer,
    encode_unfinished,
    expert_bytes,
    is_unfinished,
    place_layer,
    walk_layers,
)

_log = logging.getLogger(__name__)

SUFFIX = ".experts"
_SPARE = 2 << 30
"""Bytes that stay free on the file system."""
_POLL_S = 0.2
"""Time between two attempts to lock a file that another process writes."""


def experts_folder() -> Path:
    """Folder of all files of experts."""
    return cache_dir() / "experts"


def experts_path(model: Path) -> Path:
    """Path of the file of experts of a model, which need not exist."""
    return cached_path(experts_folder(), model, SUFFIX)


class ExpertFileWriter:
    """Writes `path` for `source`, in a `with` block.

    Entering the block waits for another process that writes the same file. If that process finished, or left layers, `keys` has them, and
    the caller need not add them. Leaving the block without `finish` keeps the layers that are written, for a later writer. A full disk or
    another error of the system removes them, and raises `ExpertFileError`.

    `nbytes` is the size of the whole file as far as the caller knows. Older files of experts are removed until there is space for that.
    """

    def __init__(self, path: Path, source: Source, nbytes: int = 0) -> None:
        self.path, self._source, self._nbytes = path, source, nbytes
        self._unfinished = path.with_suffix(UNFINISHED)
        self._layers: dict[str, LayerRecord] = {}
        self._descriptor = -1
        self._finished: ExpertFile | None = None
        self._stack = ExitStack()

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the layers that are written."""
        return frozenset(self._layers)

    def __enter__(self) -> ExpertFileWriter:
        try:
            self._begin()
        except OSError as error:
            self._stack.close()
            raise self._failed(error) from None
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        self._descriptor = -1
        if kind is not None and self._finished is not None:
            self._finished.close()

    def _begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        noted = False
        while self._descriptor < 0:
            with ExitStack() as attempt:
                descriptor = attempt.enter_context(locked(self._unfinished))
                self._finished = ExpertFile.open(self.path, self._source)
                if self._finished is not None:
                    self._layers = dict(self._finished.layers)
                    if descriptor is not None:
                        self._unfinished.unlink(missing_ok=True)
                    return
                if descriptor is not None:
                    self._descriptor = descriptor
                    self._stack = attempt.pop_all()
                    break
            if not noted:
                _log.warning("another process is writing %s: waiting for it", self.path)
                noted = True
            time.sleep(_POLL_S)
        self._continue()

    def _continue(self) -> None:
        """Find the whole layers that an interrupted process left for this source, and cut the rest. Raises OSError."""
        fd = self._descriptor
        if is_unfinished(fd, self._source):
            self._layers = {layer.key: layer for layer in walk_layers(fd)}
        else:
            os.ftruncate(fd, 0)
            os.pwrite(fd, encode_unfinished(self._source), 0)
        os.ftruncate(fd, self._end)
        self._make_room(self._nbytes - self._end)

    @property
    def _end(self) -> int:
        return max((layer.end for layer in self._layers.values()), default=PAGE)

    def _make_room(self, needed: int) -> None:
        """Remove files of other models, the least recently used first, until `needed` bytes are free. Raises OSError."""
        from shutil import disk_usage  # slow to import, and seldom needed

        folder = self.path.parent
        remove_abandoned(folder)
        missing = needed + _SPARE - disk_usage(folder).free
        if missing <= 0:
            return
        others = sum(size for _, path, size in files_with_suffix(folder, SUFFIX) if path != self.path)
        if others < missing:
            self._stack.close()
            self._unfinished.unlink(missing_ok=True)
            raise ExpertFileError(
                f"the experts need {self._nbytes / 1e9:.1f} GB at {folder}, and {missing / 1e9:.1f} GB are missing there: free space, "
                "or set MLXINFER_HOME to a folder on another disk"
            )
        remove_least_recent(folder, SUFFIX, others - missing, instead_of=self.path)

    def add(self, key: str, arrays: Mapping[str, mx.array | np.ndarray], meta: Mapping[str, Any] | None = None) -> None:
        """Write one layer: arrays `[experts, ...]` by name. `meta` is returned with the layer later, in JSON's types.

        Raises `ExpertFileError` if the disk is full or fails, and ValueError for a key that is written already or arrays of different
        numbers of experts.
        """
        if key in self._layers:
            raise ValueError(f"the layer {key} is written already")
        specs = tuple(ArraySpec(name, _dtype_name(array), tuple(array.shape[1:])) for name, array in arrays.items())
        if len({len(array) for array in arrays.values()}) != 1:
            raise ValueError(f"the arrays of {key} have different numbers of experts")
        experts = len(next(iter(arrays.values())))
        layer = place_layer(self._end, key, experts, specs, dict(meta or {}))
        try:
            checksums = self._write_records(layer, [expert_bytes(array) for array in arrays.values()])
            # The head says that the records are on the disk: a later process continues after them.
            os.fsync(self._descriptor)
            head = encode_layer(replace(layer, checksums=tuple(checksums)))
            os.pwrite(self._descriptor, head, layer.offset - len(head))
        except OSError as error:
            raise self._failed(error) from None
        drop_pages(self._descriptor, layer.offset, layer.end - layer.offset)
        self._layers[key] = replace(layer, checksums=tuple(checksums))

    def _write_records(self, layer: LayerRecord, sources: list[np.ndarray]) -> list[int]:
        checksums, padding = [], bytes(layer.stride - layer.expert_bytes)
        for expert in range(layer.experts):
            slices = [source[expert] for source in sources]
            checksum = 0
            for each in slices:
                checksum = zlib.crc32(each, checksum)
            _write_whole(self._descriptor, [*slices, padding], layer.offset + expert * layer.stride)
            checksums.append(checksum)
        return checksums

    def finish(self) -> ExpertFile:
        """Rename the file into place and open it. Raises `ExpertFileError`."""
        if self._finished is not None:
            return self._finished
        try:
            os.fsync(self._descriptor)
            os.pwrite(self._descriptor, encode_header(self._source, len(self._layers), self._end), 0)
            os.fsync(self._descriptor)
            os.replace(self._unfinished, self.path)
            mark_safe(self.path)
        except OSError as error:
            raise self._failed(error) from None
        found = ExpertFile.open(self.path, self._source)
        if found is None:
            raise ExpertFileError(f"{self.path} was removed or changed while it was made: load the model again")
        self._finished = found
        return found

    def _failed(self, error: OSError) -> ExpertFileError:
        with suppress(OSError):
            self._unfinished.unlink(missing_ok=True)
        why = error.strerror or str(error)
        return ExpertFileError(
            f"cannot write the experts to {self.path.parent} ({why}): free space there, or set MLXINFER_HOME to a folder on another disk"
        )


def _dtype_name(array: mx.array | np.ndarray) -> str:
    return str(array.dtype).rpartition(".")[2]


def _write_whole(descriptor: int, slices: list[Any], offset: int) -> None:
    """Write all slices. Raises OSError."""
    total = sum(len(each) for each in slices)
    written = os.pwritev(descriptor, slices, offset)
    if written < total:  # a signal, or a disk that becomes full: the next attempt raises
        rest = memoryview(b"".join(bytes(each) for each in slices))
        while written < total:
            written += os.pwrite(descriptor, rest[written:], offset + written)
