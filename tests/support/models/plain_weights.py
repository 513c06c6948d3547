"""Simple `Weights`, independent of the loader: over one safetensors file, and from nothing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from mlxinfer.nn.weights import Dense, Format, Matrix, Quantized, Recipe


class PlainWeights:
    """Tensors by name. Quantized matrices are put in as `Quantized`; `asked` remembers every answer, `used` what was read for it."""

    def __init__(self, tensors: dict[str, mx.array | Matrix]) -> None:
        self.tensors = {name: t if isinstance(t, (Dense, Quantized)) else Dense(t) for name, t in tensors.items()}
        self.asked: dict[str, Matrix] = {}
        self.used: set[str] = set()

    @classmethod
    def open(cls, path: Path) -> PlainWeights:
        return cls(dict(mx.load(str(path))))

    def has(self, name: str) -> bool:
        return name in self.tensors

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        matrix = self._find(name, shape, otherwise)
        assert matrix.shape == shape, f"{name}: {matrix.shape} is not {shape}"
        self.asked[name] = matrix
        return matrix

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        found = self._find(name, shape, otherwise)
        assert isinstance(found, Dense), f"{name} is quantized"
        assert found.shape == shape, f"{name}: {found.shape} is not {shape}"
        self.asked[name] = found
        return found.weight if dtype is None else found.weight.astype(dtype)

    def _find(self, name: str, shape: tuple[int, ...], otherwise: Sequence[Recipe]) -> Matrix:
        """As stored where that fits, else by a recipe; one that reads the very tensor goes before it."""
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


class RandomWeights:
    """Makes every tensor that is asked for, from a seed in its name; matrices are packed in the format that `form` gives by name."""

    def __init__(self, form: Callable[[str], Format | None] = lambda name: None, *, tied: bool = False) -> None:
        self.form = form
        self.tied = tied
        self.asked: dict[str, Matrix] = {}

    def has(self, name: str) -> bool:
        return name == "lm_head.weight" and not self.tied

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        weight, form = self._random(name, shape) * 0.12, self.form(name)
        self.asked[name] = Dense(weight) if form is None or not quantizable else pack(weight, form)
        return self.asked[name]

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        weight = 1 + self._random(name, shape) * 0.1 if "norm" in name else self._random(name, shape) * 0.1
        self.asked[name] = Dense(weight)
        return weight

    def _random(self, name: str, shape: tuple[int, ...]) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(zlib.crc32(name.encode())))


def pack(weight: mx.array, form: Format) -> Quantized:
    packed = mx.quantize(weight, group_size=form.group_size, bits=form.bits, mode=form.mode)
    return Quantized(packed[0], packed[1], packed[2] if form.mode == "affine" else None, form)


def unpacked(tensors: dict[str, Matrix]) -> dict[str, Matrix]:
    """The same values, all of them plain."""
    return {name: Dense(t.dequantize(mx.float32)) if isinstance(t, Quantized) else t for name, t in tensors.items()}
