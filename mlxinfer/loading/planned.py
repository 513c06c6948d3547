"""The weights that a model would ask for, known from the headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..nn.weights import Dense, Format, Matrix, Quantized, Recipe
from .checkpoint import Checkpoint
from .ledger import Kind, Ledger, Request
from .quantization import packed_shapes
from .weights import cast, make


@dataclass(frozen=True, slots=True)
class Planned:
    """A request, and what it will be once made: a format where it is packed, else a dtype."""

    request: Request
    stored: Format | mx.Dtype


class PlannedWeights:
    """Implements `Weights` without reading: every tensor is an array of zeros that is never evaluated.

    Build a model on it to check a checkpoint (`finish` raises `WeightsError`), or to see in `tensors` what a conversion has to write.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype = mx.float32) -> None:
        self.ledger = Ledger(checkpoint)
        self.tensors: dict[str, Planned] = {}
        self._dtype = dtype

    @property
    def skipped(self) -> dict[str, str]:
        """After `finish`: tensors that are not used, with the reason."""
        return self.ledger.skipped

    def has(self, name: str) -> bool:
        return self.ledger.has(name)

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        return self._get(name, shape, "matrix", otherwise, quantizable, None)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        matrix = self._get(name, shape, "vector", otherwise, False, dtype)
        assert isinstance(matrix, Dense)
        return matrix.weight

    def finish(self) -> None:
        self.ledger.finish()

    def _get(
        self, name: str, shape: tuple[int, ...], kind: Kind, otherwise: Sequence[Recipe], quantizable: bool, dtype: mx.Dtype | None
    ) -> Matrix:
        request = self.ledger.find(name, shape, kind, otherwise, quantizable, dtype)
        if request is None:
            return Dense(mx.zeros(shape, dtype or self._dtype))
        matrix = make(self.ledger, request, [_outline(self.ledger.checkpoint, source) for source in request.sources])
        self.tensors[name] = Planned(request, matrix.weight.dtype if isinstance(matrix, Dense) else matrix.format)
        return cast(matrix, dtype or self._dtype)


def _outline(checkpoint: Checkpoint, name: str) -> Matrix:
    stored, shape = checkpoint.stored(name), checkpoint.shape(name)
    if not isinstance(stored, Format):
        return Dense(mx.zeros(shape, stored))
    packed, groups = packed_shapes(shape, stored)
    affine = stored.mode == "affine"
    scales = mx.zeros(groups, mx.float16 if affine else mx.uint8)
    return Quantized(mx.zeros(packed, mx.uint32), scales, mx.zeros(groups, mx.float16) if affine else None, stored)
