"""Which tensors of a checkpoint a model asks for, how each is found, and what does not add up.

The common part of every `Weights` over a `Checkpoint`: it looks names and shapes up in the headers, and reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from ..errors import WeightsError
from ..nn.weights import Format, Recipe
from .checkpoint import Checkpoint
from .dtypes import dtype_name

Kind = Literal["matrix", "vector"]
_LISTED = 12

_SKIPPED = (
    (re.compile(r"rotary_emb\.inv_freq$"), "computed from the config"),
    (re.compile(r"(^|\.)mtp\."), "head that predicts several tokens, not used"),
    (re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\."), "only the text model is used"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One tensor that a model has asked for: its name and shape in the graph, and where it comes from.

    `recipe` is None where the tensor `sources[0]` is taken as it is.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    quantizable: bool
    dtype: mx.Dtype | None
    sources: tuple[str, ...]
    recipe: Recipe | None


class Ledger:
    """Remembers every request, every tensor used, and every problem."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.requests: dict[str, Request] = {}
        self.skipped: dict[str, str] = {}
        self._names = frozenset(checkpoint.names())
        self._used: set[str] = set()
        self._problems: list[str] = []

    def has(self, name: str) -> bool:
        return name in self._names

    def add_problem(self, problem: str) -> None:
        self._problems.append(problem)

    def find(
        self, name: str, shape: tuple[int, ...], kind: Kind, otherwise: Sequence[Recipe], quantizable: bool, dtype: mx.Dtype | None
    ) -> Request | None:
        """Where the tensor comes from. None where it cannot be had, which is then a problem for `finish` to report.

        A recipe is taken where the tensor itself is absent or of another shape. One that reads the very tensor goes before it: the
        model gives such a recipe where it has seen that the stored values are not yet those of the graph.
        """
        whole = name in self._names and self.checkpoint.shape(name) == shape
        recipe = next((r for r in otherwise if self._applies(r) and (not whole or name in r.sources)), None)
        if recipe is None and not whole:
            self._report(name, shape, otherwise)
            return None
        if recipe is None and not self._readable(name, kind):
            return None
        sources = (name,) if recipe is None else recipe.sources
        self._used.update(sources)
        request = Request(name, shape, kind, quantizable, dtype, sources, recipe)
        self.requests[name] = request
        return request

    def finish(self) -> None:
        """Raise `WeightsError` with every problem, and with every tensor that nobody has asked for."""
        for name in self.checkpoint.names():
            if name not in self._used:
                reason = _reason_to_skip(name, self.checkpoint.config)
                if reason is None:
                    self.add_problem(f"{name} is unexpected")
                else:
                    self.skipped[name] = reason
        if self._problems:
            more = len(self._problems) - _LISTED
            listed = "; ".join(self._problems[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
            raise WeightsError(f"{self.checkpoint.path}: {listed}")

    def _applies(self, recipe: Recipe) -> bool:
        return all(s in self._names and self.checkpoint.shape(s) == shape for s, shape in zip(recipe.sources, recipe.shapes, strict=True))

    def _readable(self, name: str, kind: Kind) -> bool:
        self._used.add(name)
        stored = self.checkpoint.stored(name)
        if isinstance(stored, Format):
            if kind == "vector":
                self.add_problem(f"{name} is quantized, which is not understood for this tensor")
            return kind == "matrix"
        if not mx.issubdtype(stored, mx.floating):
            self.add_problem(f"{name} is stored as {dtype_name(stored)}, a floating-point tensor is expected")
            return False
        return True

    def _report(self, name: str, shape: tuple[int, ...], otherwise: Sequence[Recipe]) -> None:
        candidates = [Recipe((name,), (shape,), lambda sources: sources[0]), *otherwise]
        nearest = max(candidates, key=lambda r: sum(s in self._names for s in r.sources) / len(r.sources))
        for source, expected in zip(nearest.sources, nearest.shapes, strict=True):
            if source not in self._names:
                self.add_problem(f"{source} is missing")
            elif (found := self.checkpoint.shape(source)) != expected:
                self.add_problem(f"{source} has shape {list(found)}, expected {list(expected)}")
        self._used.update(nearest.sources)


def _reason_to_skip(name: str, config: dict[str, Any]) -> str | None:
    if name == "lm_head.weight" or name.endswith(".lm_head.weight"):
        return "the head is tied to the embedding"
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    depth = config.get("num_hidden_layers")
    if layer and config.get("num_nextn_predict_layers") and isinstance(depth, int) and int(layer[1]) >= depth:
        return "layer that predicts several tokens, not used"
    return next((reason for pattern, reason in _SKIPPED if pattern.search(name)), None)
