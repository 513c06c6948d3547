"""Matrices that stay in their GGUF file, in its own blocks, until the native CPU products' packer asks for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ... import kernels_cpu
from ...nn.weights import Format, InFile
from .dequantize import dequantize
from .reader import GGUFFile, TensorInfo


def marked_to_stay(info: TensorInfo) -> TensorInfo:
    """The same tensor, marked as `kept` if it can be: a matrix of a type that the packer knows."""
    form = kernels_cpu.gguf_types().get(info.type.name)
    if form is None or len(info.shape) < 2:
        return info
    return replace(info, kept=Format(*form, mode=info.type.name))


def left_in_file(file: GGUFFile, info: TensorInfo) -> InFile:
    """A tensor that `marked_to_stay` has marked. Nothing is read yet."""
    assert info.kept
    rows = np.arange(info.row_count, dtype=np.int32).reshape(info.shape[:-1])
    return InFile((_Rows(file, info),), (info.row_count,), rows, info.shape[-1], info.kept)


class _Rows:
    """Implements `FileRows`."""

    __slots__ = ("_file", "_info", "_last")

    def __init__(self, file: GGUFFile, info: TensorInfo) -> None:
        self._file, self._info = file, info
        self._last = (0, 0)

    @property
    def name(self) -> str:
        return f"{self._file.path}: {self._info.name}"

    @property
    def tensor(self) -> str:
        return self._info.name

    def read(self, rows: np.ndarray) -> np.ndarray:
        first = int(rows.min())
        count = int(rows.max()) - first + 1
        self._last = first, count
        blocks = self._file.rows(self._info, first, count)
        return blocks if count == len(rows) and (np.diff(rows) == 1).all() else blocks[rows - first]

    def forget(self) -> None:
        self._file.forget(self._info, *self._last)

    def dequantize(self, blocks: np.ndarray) -> np.ndarray:
        return dequantize(self._info.type, blocks.reshape(-1, self._info.type.block_bytes)).reshape(len(blocks), -1)
