"""The tensors of a checkpoint as its files store them, and what every decoder makes of some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...nn.weights import Format, Matrix
from ..safetensors import SafetensorsFile, TensorInfo

Block = Mapping[str, Any]
"""The part of a config that says how the model was quantized."""


class StoredTensors:
    """Stored tensors by name. Reading raises `CheckpointError`. `float8`: what is read may be in the form of `FLOAT8`."""

    def __init__(self, path: Path, where: Mapping[str, SafetensorsFile], *, float8: bool = False) -> None:
        self.path = path
        self.float8 = float8
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> Iterable[str]:
        """In the order of the files."""
        return self._where

    def info(self, name: str) -> TensorInfo:
        """The header's entry. Raises `CheckpointError` where there is no such tensor."""
        if name not in self._where:
            raise CheckpointError(f"{self.path}: {name} is missing, which its matrix cannot be decoded without")
        return self._where[name].tensors[name]

    def array(self, name: str, first: int = 0, last: int | None = None) -> mx.array:
        """Rows `first .. last` of a tensor; 8-bit floats as numbers."""
        info = self.info(name)
        if not info.shape or (first, last) == (0, None):
            return self._where[name].read(name)
        return self._where[name].read_rows(name, first, info.shape[0] if last is None else last)

    def codes(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows of a tensor as unsigned integers of its item size, whatever they stand for: the codes of 8-bit floats, for example."""
        info = self.info(name)
        return self._where[name].read_codes(name, first, (info.shape[0] if info.shape else 1) if last is None else last)

    def columns(self, name: str, first: int, last: int) -> np.ndarray:
        """Columns of a matrix, as `codes`."""
        return np.ascontiguousarray(self.codes(name)[:, first:last])

    def check(self, name: str, *shapes: tuple[int, ...]) -> None:
        """Raise `CheckpointError` unless the tensor is there, in one of these shapes."""
        if self.info(name).shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(f"{self.path}: {name} has shape {list(self.info(name).shape)}, expected {expected}")


class PackedMatrix(Protocol):
    """A matrix that another tool has quantized."""

    parts: tuple[str, ...]
    """The stored tensors that make it up."""
    shape: tuple[int, ...]
    """The shape of the unpacked matrix `[..., out, in]`."""

    @property
    def kind(self) -> str:
        """How it is quantized, in words."""
        ...

    @property
    def stored(self) -> Format | mx.Dtype:
        """The format of MLX that holds its codes, or that of `FLOAT8`, else float32: `read` unpacks it. May read scales and orders, but no
        codes."""
        ...

    def read(self, first: int, last: int) -> Matrix:
        """Rows `first .. last` of the first axis. Scales of affine formats come in float32, so that nothing is rounded yet."""
        ...


Found = dict[str, PackedMatrix]
"""By the name of the matrix that is unpacked, such as `model.layers.0.mlp.up_proj.weight`."""
