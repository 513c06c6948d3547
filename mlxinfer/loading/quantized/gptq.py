"""GPTQ, as AutoGPTQ and GPTQModel write it.

`qweight` is int32 `[in * bits / 32, out]`, `qzeros` `[groups, out * bits / 32]`, `scales` `[groups, out]`, and `g_idx` `[in]` the group of
each input. Codes and zero points are bit streams from the low bits up, even if three bits cross words. Transposed, `qweight` is MLX's own
packing.

The first version stores zero points lowered by one, modulo the number of codes; `gptq_v2` stores them as they are. "act-order" quantizes
columns in the order of their importance, which scatters the inputs of a group. MLX has no format for that, so the matrix is unpacked.
With static groups, or groups as long as a row, the order has no effect.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...nn.weights import Format, Matrix
from ...util.name_pattern import NamePattern, PatternError, Steps
from .groups import BITS, affine, dense, group_in_mlx, unpack
from .stored import Block, Found, StoredTensors

_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""Added to a stored zero point, by `checkpoint_format`."""


class GPTQMatrix:
    """Implements `PackedMatrix`."""

    def __init__(self, tensors: StoredTensors, base: str, bits: int, added: int) -> None:
        self._tensors, self._base, self._bits, self._added = tensors, base, bits, added
        words, out = tensors.info(f"{base}.qweight").shape
        columns, groups = words * 32 // bits, tensors.info(f"{base}.scales").shape[0]
        tensors.check(f"{base}.scales", (groups, out))
        tensors.check(f"{base}.qzeros", (groups, out * bits // 32))
        self.shape: tuple[int, ...] = (out, columns)
        names = [f"{base}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")]
        self.parts = tuple(name for name in names if name in tensors)
        self._groups = groups
        if len(self.parts) == 4:
            tensors.check(names[3], (columns,))
        elif columns % groups:
            raise CheckpointError(f"{tensors.path}: {base} has {groups} groups for {columns} inputs, and no g_idx that says which")

    @property
    def kind(self) -> str:
        return f"GPTQ, {self._bits} bits" + (", act-order" if self._scattered else f" in groups of {self.shape[1] // self._groups}")

    @property
    def stored(self) -> Format | mx.Dtype:
        size = None if self._scattered else group_in_mlx(self.shape[1], self._groups)
        return Format(self._bits, size) if size else mx.float32

    def read(self, first: int, last: int) -> Matrix:
        words = np.ascontiguousarray(self._tensors.columns(self.parts[0], first, last).T)
        scales = np.array(self._tensors.array(f"{self._base}.scales").astype(mx.float32)).T[first:last]
        zeros = unpack(self._tensors.codes(f"{self._base}.qzeros"), self._bits).T[first:last]
        zeros = (zeros + np.uint8(self._added)) & np.uint8(2**self._bits - 1)
        stored = self.stored
        if isinstance(stored, Format):
            return affine(words, scales, zeros, stored)
        return dense(unpack(words, self._bits), scales, zeros, self._group_of)

    @cached_property
    def _group_of(self) -> np.ndarray:
        """Group of each input, int32 `[in]`."""
        if len(self.parts) < 4:
            return self._in_order
        group_of = self._tensors.codes(self.parts[3]).view(np.int32)
        if group_of.size and not 0 <= group_of.min() <= group_of.max() < self._groups:
            raise CheckpointError(f"{self._tensors.path}: {self.parts[3]} names a group that is not there")
        return group_of

    @property
    def _in_order(self) -> np.ndarray:
        size = -(-self.shape[1] // self._groups)
        return (np.arange(self.shape[1]) // size).astype(np.int32)

    @property
    def _scattered(self) -> bool:
        return not np.array_equal(self._group_of, self._in_order)


def find(block: Block, tensors: StoredTensors) -> Found:
    """Return the matrices of a GPTQ checkpoint. Raises `UnsupportedModelError` for other layouts."""
    version = str(block.get("checkpoint_format") or "gptq")
    if version not in _VERSIONS or block.get("is_marlin_format"):
        raise UnsupportedModelError(
            f"{tensors.path}: the checkpoint_format {version!r} of gptq cannot be read, only {', '.join(_VERSIONS)}"
        )
    found: Found = {}
    rules = _rules(block, tensors)
    for name in tensors.names():
        if name.endswith(".qweight"):
            base = name.removesuffix(".qweight")
            found[f"{base}.weight"] = GPTQMatrix(tensors, base, _bits(block, rules, base, tensors), _VERSIONS[version])
    return found


def _rules(block: Block, tensors: StoredTensors) -> list[tuple[NamePattern, Any]]:
    """Rules of `dynamic` by name pattern. Negative rules ("-:") are left out: their matrices are plain and not found here."""
    steps, rules = Steps(), []
    for rule, changes in (block.get("dynamic") or {}).items():
        if not rule.startswith("-:"):
            try:
                rules.append((NamePattern(rule.removeprefix("+:"), steps), changes))
            except PatternError as error:
                raise UnsupportedModelError(f"{tensors.path}: dynamic of gptq: {rule:.60} {error}") from None
    return rules


def _bits(block: Block, rules: list[tuple[NamePattern, Any]], base: str, tensors: StoredTensors) -> int:
    """Bits of this matrix: the first matching rule counts. Raises `UnsupportedModelError`."""
    bits: Any = block.get("bits")
    try:
        bits = next((changes.get("bits", bits) for rule, changes in rules if rule.matches(base, whole=False)), bits)
    except PatternError as error:
        raise UnsupportedModelError(f"{tensors.path}: dynamic of gptq: a rule {error}") from None
    if bits not in BITS:
        raise UnsupportedModelError(f"{tensors.path}: gptq with {bits!r} bits cannot be read, only with {', '.join(map(str, BITS))}")
    return int(bits)
