"""The tensors of a checkpoint as its files store them, and the interface of every decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...nn.weights import Format, Matrix
from ..safetensors import HeaderEntry, SafetensorsFile

Block = Mapping[str, Any]
"""The part of a config about quantization."""


class StoredTensors:
    """Stored tensors by name. Reading raises `CheckpointError`. With `float8`, matrices may be read in the form of `FLOAT8`."""

    def __init__(self, path: Path, where: Mapping[str, SafetensorsFile], *, float8: bool = False) -> None:
        self.path = path
        self.float8 = float8
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> Iterable[str]:
        """Names in the order of the files."""
        return self._where

    def info(self, name: str) -> HeaderEntry:
        """The header's entry. Raises `CheckpointError` if the tensor does not exist."""
        if name not in self._where:
            raise CheckpointError(f"{self.path}: {name} is missing, which its matrix cannot be decoded without")
        return self._where[name].tensors[name]

    def array(self, name: str, first: int = 0, last: int | None = None) -> mx.array:
        """Read rows `first .. last` of a tensor; 8-bit floats become numbers."""
        info = self.info(name)
        if not info.shape or (first, last) == (0, None):
            return self._where[name].read(name)
        return self._where[name].read_rows(name, first, info.shape[0] if last is None else last)

    def codes(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Read rows of a tensor as unsigned integers of its item size, for example the codes of 8-bit floats."""
        info = self.info(name)
        return self._where[name].read_codes(name, first, (info.shape[0] if info.shape else 1) if last is None else last)

    def columns(self, name: str, first: int, last: int) -> np.ndarray:
        """Read columns of a matrix, as `codes`."""
        return np.ascontiguousarray(self.codes(name)[:, first:last])

    def check(self, name: str, *shapes: tuple[int, ...]) -> None:
        """Raise `CheckpointError` unless the tensor exists in one of these shapes."""
        if self.info(name).shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(f"{self.path}: {name} has shape {list(self.info(name).shape)}, expected {expected}")


class PackedMatrix(Protocol):
    """A matrix that another tool has quantized."""

    parts: tuple[str, ...]
    """Names of its stored tensors."""
    shape: tuple[int, ...]
    """Shape of the unpacked matrix, `[..., out, in]`."""

    @property
    def kind(self) -> str:
        """Description of the quantization, for the user."""
        ...

    @property
    def stored(self) -> Format | mx.Dtype:
        """MLX's format for its codes, or that of `FLOAT8`, else float32: `read` unpacks it. May read scales and orders, but no codes."""
        ...

    def read(self, first: int, last: int) -> Matrix:
        """Read rows `first .. last` of the first axis. Scales of affine formats come in float32, unrounded."""
        ...


Found = dict[str, PackedMatrix]
"""Matrices by the name of the unpacked matrix, such as `model.layers.0.mlp.up_proj.weight`."""
