"""AutoAWQ's 4-bit format, in its two layouts.

`gemm`: `qweight` int32 `[in, out / 8]`, `qzeros` `[groups, out / 8]`, `scales` `[groups, out]`; the eight codes of a word belong to
outputs in the order 0, 2, 4, 6, 1, 3, 5, 7. `gemv`: `qweight` `[out, in / 8]`, which is MLX's packing, `qzeros` `[out, padded groups /
8]`, `scales` `[out, padded groups]`, all in plain order. A number is `(code - zero) * scale`.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...nn.weights import Format, Matrix
from ..gguf.bitstream import squeeze
from .groups import affine, dense, group_in_mlx, unpack
from .stored import Block, Found, StoredTensors

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight outputs' codes in a word of `gemm`."""
_VERSIONS = ("gemm", "gemv")


class AWQMatrix:
    """Implements `PackedMatrix`."""

    def __init__(self, tensors: StoredTensors, base: str, version: str, group_size: int) -> None:
        self._tensors, self._base, self._gemm = tensors, base, version == "gemm"
        first, second = tensors.info(f"{base}.qweight").shape
        out, columns = (second * 8, first) if self._gemm else (first, second * 8)
        self.shape: tuple[int, ...] = (out, columns)
        self._groups = 1 if group_size <= 0 else columns // group_size
        if self._groups * group_size != columns and group_size > 0:
            raise CheckpointError(f"{tensors.path}: {base} has {columns} inputs, which groups of {group_size} do not divide")
        if self._gemm:
            tensors.check(f"{base}.scales", (self._groups, out))
            tensors.check(f"{base}.qzeros", (self._groups, out // 8))
        else:
            padded = tensors.info(f"{base}.qzeros").shape[-1] * 8
            tensors.check(f"{base}.qzeros", (out, padded // 8))
            tensors.check(f"{base}.scales", (out, padded))
            if padded < self._groups:
                raise CheckpointError(f"{tensors.path}: {base} has {padded} zero points in a row, but {self._groups} groups")
        self.parts = tuple(f"{base}.{part}" for part in ("qweight", "qzeros", "scales"))
        self.kind = f"AWQ, 4 bits in groups of {columns // self._groups}"
        size = group_in_mlx(columns, self._groups)
        self.stored: Format | mx.Dtype = Format(4, size) if size else mx.float32

    def read(self, first: int, last: int) -> Matrix:
        words, scales, zeros = self._rows_of_gemm(first, last) if self._gemm else self._rows_of_gemv(first, last)
        if isinstance(self.stored, Format):
            return affine(words, scales, zeros, self.stored)
        return dense(unpack(words, 4), scales, zeros, np.arange(self.shape[1]) // (self.shape[1] // self._groups))

    def _rows_of_gemm(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start, stop = first // 8, -(-last // 8)
        mine = slice(first - start * 8, last - start * 8)

        def codes(part: str) -> np.ndarray:
            words = self._tensors.columns(f"{self._base}.{part}", start, stop)
            ordered = unpack(words, 4).reshape(*words.shape, 8)[..., _ORDER].reshape(len(words), -1)
            return np.ascontiguousarray(ordered[:, mine].T)

        scales = np.array(self._tensors.array(f"{self._base}.scales").astype(mx.float32)).T[first:last]
        return squeeze(codes("qweight"), 4).view(np.uint32), scales, codes("qzeros")

    def _rows_of_gemv(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        words = self._tensors.codes(f"{self._base}.qweight", first, last)
        zeros = unpack(self._tensors.codes(f"{self._base}.qzeros", first, last), 4)
        scales = np.array(self._tensors.array(f"{self._base}.scales", first, last).astype(mx.float32))
        return words, scales[:, : self._groups], zeros[:, : self._groups]


def find(block: Block, tensors: StoredTensors) -> Found:
    """Return the matrices of an AWQ checkpoint. Raises `UnsupportedModelError` for other layouts."""
    version = str(block.get("version") or "gemm").lower()
    bits, group_size = block.get("bits", block.get("w_bit")), block.get("group_size", block.get("q_group_size"))
    if version not in _VERSIONS:
        raise UnsupportedModelError(f"{tensors.path}: the layout {version!r} of awq cannot be read, only {' and '.join(_VERSIONS)}")
    if bits != 4 or type(group_size) is not int:
        raise UnsupportedModelError(f"{tensors.path}: awq with {bits!r} bits in groups of {group_size!r} cannot be read, only with 4 bits")
    found: Found = {}
    for name in tensors.names():
        if name.endswith(".qweight"):
            base = name.removesuffix(".qweight")
            found[f"{base}.weight"] = AWQMatrix(tensors, base, version, group_size)
    return found
