"""How much each input of a matrix counts: its mean square while the model reads a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..loading.checkpoint import Checkpoint
<<<<<<< HEAD
from ..loading.weights import Progress
from ..nn.weights import Matrix
from .stream import Place, batches, plan_of, read_through
=======
from ..loading.weights import CheckpointWeights, MetaWeights, Progress, TensorRequest
from ..models import architecture, build
from ..models.block import AnyBlock
from ..models.decoder import Architecture, LayerInputs
from ..models.vlm_text import TEXT_MODELS, text_config
from ..nn.linear import Embedding, JoinedLinear, Linear
from ..nn.moe import ExpertLinear
from ..nn.norms import RMSNorm
from ..nn.packing import objects, settle
from ..nn.weights import Dense, Matrix, map_rows, numbers
from .reader import blocks
>>>>>>> families

Importance = dict[str, mx.array]
"""By the tensor's name in the graph: float32 `[in]`, or `[experts, in]`."""

_EXPERT_FLOOR = 0.1
"""Least share that all experts' mean square has in that of one: some see few tokens, or none."""


_TEXTS, _TOKENS = 8, 512
"""How many random texts are read, and tokens of each."""


TOKENS = _TEXTS * _TOKENS
"""Tokens in all random texts."""


def random_texts(config: dict[str, Any]) -> list[list[int]]:
    """Token ids, always the same for a size of vocabulary. They serve almost as well as real text: what a matrix's inputs are scaled by
    depends on the model more than on what it reads."""
    vocab = plan_of(config).sizes.vocab
    ids = np.random.default_rng(0).integers(0, vocab, (_TEXTS, _TOKENS))
    return cast("list[list[int]]", ids.tolist())


def measure(checkpoint: Checkpoint, texts: Sequence[Sequence[int]], progress: Progress | None = None) -> Importance:
    """The mean squares of the inputs of every matrix, while the model reads these texts (token ids), each from its beginning; memory,
    progress and errors as of `read_through`."""
    moments = _EveryMoments()
    read_through(checkpoint, batches(texts), moments, progress)
    return moments.found


class _EveryMoments:
    """A `Watcher` that keeps the mean squares."""

    def __init__(self) -> None:
        self.found: Importance = {}

    def place(self, names: list[str]) -> Moments:
        return Moments()

<<<<<<< HEAD
    def done(self, places: list[tuple[list[str], Place]]) -> dict[str, Matrix]:
        for names, place in places:
            assert isinstance(place, Moments)
            mean = place.mean()
            if mean is not None:
                mx.eval(mean)
                self.found.update((name, mean) for name in names)
        return {}
=======
    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, *, progress: Progress | None) -> None:
        super().__init__(checkpoint, dtype, progress=progress)
        self._embedding: TensorRequest | None = None

    def _answer(self, request: TensorRequest) -> Matrix:
        if not request.name.endswith(("embed_tokens.weight", "embeddings.weight", "lm_head.weight")):
            return super()._answer(request)
        self._embedding = self._embedding or request
        self._count(request)
        return Dense(mx.zeros(request.shape, self.dtype))  # never evaluated

    def embedded(self, tokens: Sequence[int]) -> mx.array:
        """Rows of the embedding `[tokens, hidden]`."""
        assert self._embedding is not None
        ids, wanted, first, found = np.array(tokens), np.unique(tokens), 0, []
        for block in blocks(self.index.checkpoint, self._embedding):
            here = wanted[(wanted >= first) & (wanted < first + block.shape[0])] - first
            if here.size:
                found.append(numbers(map_rows(block, lambda rows, here=here: rows[mx.array(here)])).astype(self.dtype))  # type: ignore[misc]
                mx.eval(found[-1])
            first += block.shape[0]
        return mx.concatenate(found)[mx.array(np.searchsorted(wanted, ids))]


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


def _names_of_inputs(checkpoint: Checkpoint) -> list[list[list[str]]]:
    """For each part of a model, for each place in it where a product reads an input, the tensors that are multiplied with it."""
    weights, parts = _Named(checkpoint), []

    def name(part: object) -> None:
        places = []
        for linears in _places(part):
            found = {number for linear in linears for number in _numbers_in(linear)}
            places.append([weights.names[number] for number in sorted(found)])
        parts.append(places)
        weights.names.clear()

    build(checkpoint.config, weights, ready=name)
    return parts


def _numbers_in(linear: Linear | Embedding) -> set[int]:
    assert isinstance(linear.matrix, Dense)
    return set(cast("list[int]", linear.matrix.weight[..., 0].flatten().tolist()))


def _places(part: object) -> Iterator[list[Linear | Embedding]]:
    """The products of a part that read the same input, together: each place once, in an order that depends on the graph alone."""
    seen: set[int] = set()
    for node in objects(part):
        if isinstance(node, JoinedLinear):
            seen.update(map(id, node.linears))
            yield list(node.linears)
        elif isinstance(node, (Linear, Embedding)) and id(node) not in seen:
            yield [node]
>>>>>>> families


@dataclass(slots=True)
class Moments:
    """Sums over the tokens that came to one place."""

    squares: mx.array | None = None
    """float32 `[in]`, or `[experts, in]`."""
    count: mx.array = field(default_factory=lambda: mx.zeros(1))
    """Tokens `[1]`, or `[experts, 1]`."""

    def add(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool = False) -> None:
        rows = mx.square(x.astype(mx.float32))
        if experts is None:
            rows = rows.reshape(-1, x.shape[-1])
            self.squares, self.count = _sum(self.squares, rows.sum(0)), self.count + rows.shape[0]
        else:
            rows = mx.broadcast_to(rows.squeeze(-2), (*experts.shape, x.shape[-1])).reshape(-1, x.shape[-1])
            chosen = experts.flatten()
            self.squares = _sum(self.squares, mx.zeros((expert_count, x.shape[-1])).at[chosen].add(rows))
            self.count = self.count + mx.zeros((expert_count, 1)).at[chosen].add(mx.ones((chosen.size, 1)))
        mx.eval(self.squares, self.count)

    def mean(self) -> mx.array | None:
        if self.squares is None or self.squares.ndim == 1:
            return self.squares if self.squares is None else self.squares / self.count
        overall = self.squares.sum(0) / mx.maximum(self.count.sum(), 1)
        floor = _EXPERT_FLOOR * mx.maximum(self.count.sum() / self.count.size, 1)
        return (self.squares + floor * overall) / (self.count + floor)


def _sum(before: mx.array | None, more: mx.array) -> mx.array:
    return more if before is None else before + more
<<<<<<< HEAD
=======


class _Watched(Packed):
    """A matrix that notes what it is multiplied with. Products hand everything to a packed matrix, so it passes for one."""

    __slots__ = ("matrix", "moments")
    matrix: Matrix | Packed
    moments: _Moments

    def __init__(self, matrix: Matrix | Packed, moments: _Moments) -> None:
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "moments", moments)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def can_gate(self, activation: str) -> bool:
        return False

    def multiply(
        self,
        x: mx.array,
        *,
        bias: mx.array | None = None,
        residual: mx.array | None = None,
        norm: mx.array | None = None,
        eps: float = 0.0,
        gate: str | None = None,
        experts: mx.array | None = None,
    ) -> mx.array:
        assert gate is None
        x = x if norm is None else RMSNorm(norm, eps)(x)
        self.moments.add(x, experts, self.shape[0])
        if isinstance(self.matrix, Packed):
            return self.matrix.multiply(x, bias=bias, residual=residual, experts=experts)
        if experts is None:
            return Linear(self.matrix, bias)(x, onto=residual)
        return ExpertLinear(self.matrix, bias)(x, experts).squeeze(-2)


class _Reader:
    """Takes the parts of a model as they are built: each reads the texts' states on, and is dropped."""

    def __init__(self, plan: Architecture, texts: Sequence[Sequence[int]], names: list[list[list[str]]], weights: _Weights) -> None:
        self.found: Importance = {}
        self._plan, self._names = plan, iter(names)
        self._weights = weights
        self._tokens = [token for text in texts for token in text]
        longest, total = max(map(len, texts)), sum(map(len, texts))
        cache = PagedCache(plan.specs, dtype=weights.dtype, kv_cache_tokens=total + 64 * len(texts), chunk=longest)
        starts = [sum(map(len, texts[:number])) for number in range(len(texts))]
        self._step = cache.begin([Segment(cache.open(), start, len(text), 0, len(text)) for start, text in zip(starts, texts, strict=True)])
        self._rotations: dict[str, Rotation] = {name: rope.at(self._step) for name, rope in plan.ropes.items()}
        self._x = mx.zeros((0,))
        self._embedding: list[str] = []
        self._inputs: list[mx.array] | None = None

    def read(self, part: object) -> None:
        """Takes the next part."""
        names = next(self._names)
        if isinstance(part, Embedding):
            self._embedding = names[0]
            self._x = self._weights.embedded(self._tokens)
            if self._plan.embedding_scale != 1.0:
                self._x = self._x * mx.array(self._plan.embedding_scale, self._x.dtype)
        elif isinstance(part, list):
            self._read_head(part, names)
        elif self._plan.inputs and self._inputs is None:
            self._read_inputs(cast(LayerInputs, part), names)
        else:
            self._read_block(cast(AnyBlock, part), names)
        mx.eval(self._x)

    def _read_inputs(self, part: LayerInputs, names: list[list[str]]) -> None:
        """Every block's own input; their products read the embedded tokens."""
        for place, linears in zip(names, _places(part), strict=True):
            if isinstance(linears[0], Linear):
                moments = _Moments()
                moments.add(self._x, None, 0)
                self._note(place, moments.mean())
        settle(part)
        self._inputs = list(part(mx.array(self._tokens, mx.int32), self._x))
        mx.eval(self._inputs)

    def _read_block(self, block: AnyBlock, names: list[list[str]]) -> None:
        settle(block)
        watched: list[tuple[list[str], _Moments]] = []
        places = list(_places(block))
        for place, linears in zip(names, places, strict=True):
            moments = _Moments()
            watched.append((place, moments))
            linears[0].matrix = _Watched(linears[0].matrix, moments)  # the others read the same
        self._x = block(self._x, self._step, self._rotations, self._inputs.pop(0) if self._inputs else None)
        mx.eval(self._x)
        self._step.full.clear()  # nobody reads the pages of a layer that is done
        for place, moments in watched:
            self._note(place, moments.mean())
        for linears in places:
            for linear in linears:
                linear.matrix = Dense(mx.zeros((1, 1)))
        mx.clear_cache()

    def _read_head(self, part: list[Any], names: list[list[str]]) -> None:
        norm, head = part
        moments = _Moments()
        moments.add(norm(self._x), None, 0)
        self._note(self._embedding if head is None else names[0], moments.mean())

    def _note(self, names: list[str], mean: mx.array | None) -> None:
        if mean is not None:
            mx.eval(mean)
            self.found.update((name, mean) for name in names)
>>>>>>> families
