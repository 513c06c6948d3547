"""Reads texts through a model, one block of layers in memory at a time, and shows what each of its matrices is multiplied with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from .. import kernels_cpu
from ..cache.base import AttentionSpec, Rotation, Segment
from ..cache.paged import PagedCache
from ..cache.step import CacheStep
from ..device import default_dtype
from ..kernels_cpu import Packed
from ..loading.checkpoint import Checkpoint
from ..loading.weights import CheckpointWeights, Progress, TensorRequest
from ..models import architecture, build
from ..models.block import AnyBlock
from ..models.decoder import Architecture, LayerInputs
from ..models.vlm_text import TEXT_MODELS, text_config
from ..nn.linear import Embedding, Linear
from ..nn.moe import ExpertLinear
from ..nn.norms import RMSNorm
from ..nn.packing import settle
from ..nn.weights import Dense, Matrix, map_rows, numbers
from .batches import Batch
from .places import Names, drop, names_of_inputs, places_of
from .reader import blocks
from .stand_in import StandIn


class Place(Protocol):
    """Somewhere in a model where a product, or several joined ones, read an input."""

    def add(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool) -> None:
        """Take note of the inputs of one batch: `[..., in]`, or `[tokens, 1 or k, 1, in]` with the experts chosen for them `[tokens, k]`.
        `held_out`: from texts that are kept aside."""
        ...


class Watcher(Protocol):
    """What wants to know the inputs of matrices."""

    def place(self, names: list[str]) -> Place | None:
        """For the tensors that are multiplied with one input; None where it does not matter."""
        ...

    def done(self, places: list[tuple[list[str], Place]]) -> None:
        """All texts have been read by the part of the model that has these places."""
        ...


class Bookmarks(Protocol):
    """Keeps the texts' states between two parts of a model, so that an interrupted reading goes on there."""

    def load(self) -> tuple[int, list[mx.array]] | None:
        """How many parts have been read, and the states after them `[tokens, hidden]`, batch by batch; None to begin."""
        ...

    def save(self, parts: int, states: list[mx.array]) -> None: ...


def read_through(
    checkpoint: Checkpoint,
    texts: Sequence[Batch],
    watcher: Watcher,
    progress: Progress | None = None,
    bookmarks: Bookmarks | None = None,
) -> None:
    """The model reads these texts, each from its beginning, and `watcher` sees the inputs of every matrix.

    One block of layers is in memory at a time, with the texts' states `[tokens, hidden]`. `progress` is called with (bytes read, bytes in
    all). Raises `MLXInferError` for a checkpoint that cannot be loaded.
    """
    names = names_of_inputs(checkpoint)
    config = checkpoint.config
    weights = StreamedWeights(checkpoint, default_dtype(), progress=progress)
    weights.keeps_halves = kernels_cpu.in_use()
    reader = _Reader(plan_of(config), texts, names, weights, watcher, bookmarks)
    build(config, weights, ready=reader.read)
    weights.finish()


def load_part(checkpoint: Checkpoint, number: int) -> tuple[object, StreamedWeights]:
    """One part of a model alone: the embedding (0), a block (from 1 on), or the list of the last norm and the head. The tensors of other
    parts are not read."""
    weights, parts, found = StreamedWeights(checkpoint, default_dtype(), progress=None), 0, None
    weights.skipping = number != 0

    def ready(part: object) -> None:
        nonlocal parts, found
        found = part if parts == number else found
        parts += 1
        weights.skipping = parts != number

    build(checkpoint.config, weights, ready=ready)
    return found, weights


def plan_of(config: dict[str, Any]) -> Architecture:
    """The plan of the text model."""
    return architecture(text_config(config) if config["model_type"] in TEXT_MODELS else config)


class StreamedWeights(CheckpointWeights):
    """Without the largest matrices: of the embedding only the rows of a text are read, and what comes after the last layer need not be
    computed."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, *, progress: Progress | None) -> None:
        super().__init__(checkpoint, dtype, progress=progress)
        self._embedding: TensorRequest | None = None
        self.skipping = False
        """Whether matrices are asked for that nobody will use."""
        self.keeps_halves = False
        """Whether a matrix in 16 bits stays so, as the CPU's products take it: a block of layers lies in memory unpacked before it is
        packed."""

    def _answer(self, request: TensorRequest) -> Matrix:
        last = request.name.endswith(("embed_tokens.weight", "embeddings.weight", "lm_head.weight"))
        if not last and not (self.skipping and request.kind == "matrix"):
            return self._read(request)
        self._embedding = self._embedding or (request if last else None)
        self._count(request)
        return Dense(mx.zeros(request.shape, self.dtype))  # never evaluated

    def _read(self, request: TensorRequest) -> Matrix:
        stored = self.index.checkpoint.stored(request.sources[0])
        if not self.keeps_halves or request.kind == "vector" or stored not in (mx.bfloat16, mx.float16):
            return super()._answer(request)
        usual, self.dtype = self.dtype, cast("mx.Dtype", stored)
        try:
            return super()._answer(request)
        finally:
            self.dtype = usual

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


class _Watched(StandIn):
    """A matrix that shows what it is multiplied with."""

    __slots__ = ("held_out", "matrix", "place")
    matrix: Matrix | Packed
    place: Place
    held_out: bool

    def __init__(self, matrix: Matrix | Packed, place: Place) -> None:
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "place", place)
        self.tell(held_out=False)

    def tell(self, *, held_out: bool) -> None:
        """Whose inputs come next."""
        object.__setattr__(self, "held_out", held_out)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def normed(self, x: mx.array, norm: mx.array, eps: float) -> mx.array:
        return RMSNorm(norm, eps)(x)

    def product(self, x: mx.array, bias: mx.array | None, residual: mx.array | None, experts: mx.array | None) -> mx.array:
        self.place.add(x, experts, self.shape[0], self.held_out)
        if isinstance(self.matrix, Packed):
            return self.matrix.multiply(x, bias=bias, residual=residual, experts=experts)
        if experts is None:
            return Linear(self.matrix, bias)(x, onto=residual)
        return ExpertLinear(self.matrix, bias)(x, experts).squeeze(-2)


class _Reader:
    """Takes the parts of a model as they are built: each reads the texts' states on, and is dropped."""

    def __init__(
        self,
        plan: Architecture,
        texts: Sequence[Batch],
        names: list[Names],
        weights: StreamedWeights,
        watcher: Watcher,
        bookmarks: Bookmarks | None,
    ) -> None:
        self._plan, self._names, self._texts = plan, names, texts
        self._weights, self._watcher, self._bookmarks = weights, watcher, bookmarks
        self._parts = 0
        self._embedding: list[str] = []
        self._inputs: list[list[mx.array]] | None = None
        """For each batch what the blocks to come get besides the stream, where they get something."""
        self._steps: dict[int, CacheStep] | None = None
        """The steps of batches, where layers read what earlier ones have stored."""
        if any(isinstance(spec, AttentionSpec) and spec.shared for spec in plan.specs):
            self._steps = {}
        if self._steps is not None or plan.inputs is not None:
            self._bookmarks = None  # more than the states would have to be kept
        kept = self._bookmarks.load() if self._bookmarks else None
        self._done, self._states = kept or (0, [])

    def read(self, part: object) -> None:
        """Takes the next part."""
        names = self._names[self._parts]
        self._parts += 1
        if isinstance(part, Embedding):
            self._embedding = names[0][0]
        if self._parts > self._done:
            if isinstance(part, Embedding):
                self._embed()
            elif isinstance(part, list):
                self._read_head(part, names)
            elif self._plan.inputs and self._inputs is None:
                self._read_inputs(cast(LayerInputs, part), names)
            else:
                self._read_block(cast(AnyBlock, part), names)
            if self._bookmarks:
                self._bookmarks.save(self._parts, self._states)
        self._weights.skipping = self._parts < self._done
        mx.clear_cache()

    def _embed(self) -> None:
        rows = self._weights.embedded([token for batch in self._texts for token in batch.tokens])
        if self._plan.embedding_scale != 1.0:
            rows = rows * mx.array(self._plan.embedding_scale, rows.dtype)
        ends = np.cumsum([len(batch.tokens) for batch in self._texts])[:-1]
        self._states = [*mx.split(rows, ends.tolist())]
        mx.eval(self._states)

    def _read_inputs(self, part: LayerInputs, names: Names) -> None:
        """Every block's own input; their products read the embedded tokens."""
        places: list[tuple[list[str], Place]] = []
        for parts, linears in zip(names, places_of(part), strict=True):
            tensors = [name for each in parts for name in each]
            place = self._watcher.place(tensors) if isinstance(linears[0], Linear) else None
            if place is not None:
                places.append((tensors, place))
                for batch, states in zip(self._texts, self._states, strict=True):
                    place.add(states, None, 0, batch.held_out)
        self._watcher.done(places)
        settle(part)
        pairs = zip(self._texts, self._states, strict=True)
        self._inputs = [list(part(mx.array(batch.tokens, mx.int32), states)) for batch, states in pairs]
        mx.eval(self._inputs)

    def _read_block(self, block: AnyBlock, names: Names) -> None:
        settle(block)
        watched, seen = list[_Watched](), list[list[Linear | Embedding]]()
        places: list[tuple[list[str], Place]] = []
        joined = list(places_of(block))
        for parts, linears in zip(names, joined, strict=True):
            tensors = [name for part in parts for name in part]
            place = self._watcher.place(tensors)
            if place is not None:
                places.append((tensors, place))
                watched.append(_Watched(linears[0].matrix, place))
                linears[0].matrix = watched[-1]  # the others read the same
                seen.append(linears)
        for number, batch in enumerate(self._texts):
            for matrix in watched:
                matrix.tell(held_out=batch.held_out)
            step = (self._steps or {}).get(number) or self._step(batch)
            if self._steps is not None:
                self._steps[number] = step
            own = self._inputs[number][0] if self._inputs else None
            self._states[number] = self._passed(block, self._states[number], step, own)
        for others in self._inputs or ():
            others.pop(0)
        for matrix, linears in zip(watched, seen, strict=True):
            linears[0].matrix = matrix.matrix
        drop(joined)
        self._watcher.done(places)

    def _passed(self, block: AnyBlock, states: mx.array, step: CacheStep, own: mx.array | None = None) -> mx.array:
        """The states after a block."""
        rotations: dict[str, Rotation] = {name: rope.at(step) for name, rope in self._plan.ropes.items()}
        found = block(states, step, rotations, own)
        mx.eval(found)
        step.full.clear()  # nobody reads the pages of a layer that is done
        return found

    def _step(self, batch: Batch) -> CacheStep:
        """An empty cache, as a step over these texts sees it."""
        lengths = [len(text) for text in batch.texts]
        pages = sum(lengths) + 64 * len(lengths)
        cache = PagedCache(self._plan.specs, dtype=self._weights.dtype, kv_cache_tokens=pages, chunk=max(lengths))
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        return cache.begin([Segment(cache.open(), start, count, 0, count) for start, count in zip(starts, lengths, strict=True)])

    def _read_head(self, part: list[Any], names: Names) -> None:
        norm, head = part
        tensors = self._embedding if head is None else names[0][0]
        place = self._watcher.place(tensors)
        if place is None:
            return
        for number, batch in enumerate(self._texts):
            place.add(norm(self._states[number]), None, 0, batch.held_out)
        self._watcher.done([(tensors, place)])
