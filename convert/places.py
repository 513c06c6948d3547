"""Where a model multiplies, and with which tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import mlx.core as mx

from ..loading.checkpoint import Checkpoint
from ..loading.weights import MetaWeights, TensorRequest
from ..models import build
from ..nn.linear import Embedding, JoinedLinear, Linear
from ..nn.packing import objects
from ..nn.weights import Dense, Matrix


class _Named(MetaWeights):
    """Instead of its numbers, a matrix is filled with the position of its name in `names`: joined or split, it tells where its rows come
    from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.names: list[str] = []

    def _answer(self, request: TensorRequest) -> Matrix:
        super()._answer(request)
        if request.kind == "vector":
            return Dense(mx.zeros(request.shape, request.dtype or self.dtype))
        self.names.append(request.name)
        return Dense(mx.broadcast_to(mx.array(len(self.names) - 1, mx.uint8), request.shape))


Names = list[list[list[str]]]
"""By place of a part and by product that reads its input: the tensors whose rows that product has, in their order."""


def names_of_inputs(checkpoint: Checkpoint) -> list[Names]:
    """For each part of a model, which tensors are multiplied with what. The numbers of one part are in memory at a time."""
    weights, parts = _Named(checkpoint), []

    def name(part: object) -> None:
        places = list(places_of(part))
        parts.append([[[weights.names[n] for n in _numbers_in(linear)] for linear in linears] for linears in places])
        drop(places)
        weights.names.clear()

    build(checkpoint.config, weights, ready=name)
    return parts


def _numbers_in(linear: Linear | Embedding) -> list[int]:
    assert isinstance(linear.matrix, Dense)
    rows = linear.matrix.weight[..., 0]
    return list(dict.fromkeys(cast("list[int]", rows[0 if rows.ndim > 1 else slice(None)].flatten().tolist())))


def places_of(part: object) -> Iterator[list[Linear | Embedding]]:
    """The products of a part that read the same input, together: each place once, in an order that depends on the graph alone."""
    seen: set[int] = set()
    for node in objects(part):
        if isinstance(node, JoinedLinear):
            seen.update(map(id, node.linears))
            yield list(node.linears)
        elif isinstance(node, (Linear, Embedding)) and id(node) not in seen:
            yield [node]


def drop(places: list[list[Linear | Embedding]]) -> None:
    """Forget the matrices of a part."""
    for linears in places:
        for linear in linears:
            linear.matrix = Dense(mx.zeros((1, 1)))
    mx.clear_cache()
