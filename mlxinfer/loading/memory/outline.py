"""Graphs of models of which only the config is known: tensors have their shape and dtype, and share one zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ...models import build
from ...models.decoder import Model
from ...nn.weights import Dense, Format, Matrix, Quantized, Recipe
from ...util.dataclass import dataclass
from ..formats import packed_shapes

_TIED_BY_DEFAULT = ("smollm3",)
"""`model_type`s that share embedding and output matrix unless the config says otherwise, as in transformers."""


def zeros(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Zeros with the memory of one number."""
    return mx.broadcast_to(mx.zeros((), dtype), tuple(shape))


class EmptyWeights:
    """A `Weights` with every requested tensor. Matrices have the format `form`, or 16 bits if None."""

    def __init__(self, form: Format | None, *, tied: bool) -> None:
        self._form = form
        self._tied = tied
        self._sizes: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the requested tensors."""
        return sum(self._sizes.values())

    def has(self, name: str) -> bool:
        return name == "lm_head.weight" and not self._tied

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        form = self._form
        if form is None or not quantizable or shape[-1] % form.group_size:
            return Dense(self._noted(name, zeros(shape, mx.bfloat16)))
        packed, groups = packed_shapes(shape, form)
        codes, scales, biases = zeros(packed, mx.uint32), zeros(groups, mx.bfloat16), zeros(groups, mx.bfloat16)
        self._sizes[name] = codes.nbytes + scales.nbytes + biases.nbytes
        return Quantized(codes, scales, biases, form)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        return self._noted(name, zeros(shape, dtype or mx.bfloat16))

    def _noted(self, name: str, array: mx.array) -> mx.array:
        self._sizes[name] = array.nbytes
        return array


@dataclass(frozen=True, slots=True)
class OutlinedModel:
    """A model that `plan_memory` plans by its config."""

    model: Model
    weight_bytes: int
    dtype: mx.Dtype
    load_bytes: int = 0
    """0: the largest tensor is not known."""


def outline(config: Mapping[str, Any], dtype: mx.Dtype, form: Format | None = None, weight_bytes: int | None = None) -> OutlinedModel:
    """Build the graph of a config for activations in `dtype`. `form` is that of the matrices, by default MLX's 4 bits in groups of 64.

    `weight_bytes` is the size of the weights, by default that of the graph's tensors. Raises `UnsupportedModelError`.
    """
    text = config.get("text_config", config)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", text.get("model_type") in _TIED_BY_DEFAULT)))
    weights = EmptyWeights(form or Format(4, 64), tied=tied)
    model = build(dict(config), weights)
    return OutlinedModel(model, weights.nbytes if weight_bytes is None else weight_bytes, dtype)
