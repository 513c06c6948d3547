"""A simple `Weights` over one safetensors file, independent of the loader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from mlxinfer.nn.weights import Dense, Matrix, Quantized, Recipe


class PlainWeights:
    """Tensors by name. Quantized matrices are put in as `Quantized`; `asked` remembers names and shapes in order, `used` what was read."""

    def __init__(self, tensors: dict[str, mx.array | Matrix]) -> None:
        self.tensors = {name: t if isinstance(t, (Dense, Quantized)) else Dense(t) for name, t in tensors.items()}
        self.asked: dict[str, tuple[int, ...]] = {}
        self.used: set[str] = set()

    @classmethod
    def open(cls, path: Path) -> PlainWeights:
        return cls(dict(mx.load(str(path))))

    def has(self, name: str) -> bool:
        return name in self.tensors

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        matrix = self._find(name, shape, otherwise)
        assert matrix.shape == shape, f"{name}: {matrix.shape} is not {shape}"
        return matrix

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        found = self._find(name, shape, otherwise)
        assert isinstance(found, Dense), f"{name} is quantized"
        assert found.shape == shape, f"{name}: {found.shape} is not {shape}"
        return found.weight if dtype is None else found.weight.astype(dtype)

    def _find(self, name: str, shape: tuple[int, ...], otherwise: Sequence[Recipe]) -> Matrix:
        """As stored where that fits, else by a recipe; one that reads the very tensor goes before it."""
        self.asked[name] = shape
        whole = self._fits(name, shape)
        for recipe in otherwise:
            applies = all(self._fits(source, its) for source, its in zip(recipe.sources, recipe.shapes, strict=True))
            if applies and (not whole or name in recipe.sources):
                return recipe.make([self._read(source) for source in recipe.sources])
        assert whole, f"{name} {shape} is missing"
        return self._read(name)

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        return name in self.tensors and self.tensors[name].shape == shape

    def _read(self, name: str) -> Matrix:
        self.used.add(name)
        return self.tensors[name]
