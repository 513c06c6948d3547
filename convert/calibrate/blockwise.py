"""Runs texts through a model, one block of layers in memory at a time, and shows a watcher the inputs of each matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import mlx.core as mx
import numpy as np

from ... import kernels_cpu
from ...errors import UnsupportedModelError
from ...kernels_cpu import Packed
from ...loading.checkpoint import Checkpoint
from ...loading.weights import CheckpointWeights, Progress, TensorRequest
from ...models import architecture, build, graph_weights
from ...models.block import AnyBlock
from ...models.blockwise import Batch, BlockReader, drop
from ...models.decoder import LayerInputs, OutputLayer
from ...models.vlm_text import stored_name
from ...nn.linear import Embedding, JoinedLinear, Linear
from ...nn.moe import ExpertLinear
from ...nn.norms import RMSNorm
from ...nn.packing import holders, objects, settle
from ...nn.weights import Dense, Matrix, map_rows, numbers
from ...util.device import default_dtype
from ..write.reader import blocks

_BY_ROWS = ("embed_tokens.weight", "embeddings.weight", "embed_tokens_per_layer.weight", "lm_head.weight")
"""Name endings of matrices that are never read whole."""


class InputRecorder(Protocol):
    """A place in a model where one or several joined products read an input."""

    def add(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool) -> None:
        """Record the inputs of one batch: `[..., in]`, or `[tokens, 1 or k, 1, in]` with the chosen experts `[tokens, k]`.

        `held_out` inputs come from texts kept for validation.
        """
        ...


class Watcher(Protocol):
    """Receives the inputs of matrices."""

    def recorder(self, names: list[str]) -> InputRecorder | None:
        """Return the place for tensors that are multiplied with one input; None to ignore it."""
        ...

    def finish(self, places: list[tuple[list[str], InputRecorder]]) -> None:
        """Handle the places of one part of the model after it has read all texts."""
        ...


class Bookmarks(Protocol):
    """Stores the texts' states between two parts of a model, so that an interrupted run resumes."""

    def load(self) -> tuple[int, list[mx.array]] | None:
        """Return the number of parts read and the states after them `[tokens, hidden]` per batch; None to start."""
        ...

    def save(self, parts: int, states: list[mx.array]) -> None: ...


def read_through(
    checkpoint: Checkpoint,
    texts: Sequence[Batch],
    watcher: Watcher,
    progress: Progress | None = None,
    bookmarks: Bookmarks | None = None,
) -> None:
    """Run texts through the model, each from its beginning, and show `watcher` the inputs of every matrix that can be quantized.

    Memory has one block of layers and the texts' states `[tokens, hidden]`. `progress` gets (bytes read, total bytes). Raises
    `MLXInferError` for a checkpoint that cannot be loaded, or has a part or matrix that cannot be watched.
    """
    weights = StreamedWeights(checkpoint, default_dtype(), progress=progress)
    weights.keeps_halves = kernels_cpu.in_use()
    build(checkpoint.config, weights, ready=_WatchedReader(checkpoint, texts, weights, watcher, bookmarks))
    weights.finish()


def load_part(checkpoint: Checkpoint, number: int) -> tuple[object, StreamedWeights]:
    """Load one part of a model: the embedding (0), a block (from 1 on), or the rest. Reads no tensors of other parts."""
    weights, parts, found = StreamedWeights(checkpoint, default_dtype(), progress=None), 0, None
    weights.skipping = number != 0

    def ready(part: object) -> None:
        nonlocal parts, found
        found = part if parts == number else found
        parts += 1
        weights.skipping = parts != number

    build(checkpoint.config, weights, ready=ready)
    return found, weights


class StreamedWeights(CheckpointWeights):
    """Leaves out the largest matrices: only the texts' rows of embeddings are read, and the output layer may stay unread."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, *, progress: Progress | None) -> None:
        super().__init__(checkpoint, dtype, progress=progress)
        self._graph = graph_weights(checkpoint.config, self)
        self._unread: list[tuple[Matrix, TensorRequest]] = []
        self.skipping = False
        """True while the graph asks for matrices that are not used."""
        self.keeps_halves = False
        """True if matrices in 16 bits stay so, as the CPU's products take them. A block is in memory unpacked before it is packed."""

    def stored_name(self, name: str) -> str:
        """Return the name of a request from the graph's name of the tensor."""
        return stored_name(self._graph, name)

    def request_of(self, embedding: Embedding) -> TensorRequest:
        """Return the request of an embedding that was not read. Raises `UnsupportedModelError` for one that was read whole."""
        for matrix, request in self._unread:
            if matrix is embedding.matrix:
                return request
        raise UnsupportedModelError(
            "this model has an embedding whose name is not known, and which is not read whole: use the encoder minmax"
        )

    def _answer(self, request: TensorRequest) -> Matrix:
        if not (self.skipping and request.kind == "matrix") and not request.name.endswith(_BY_ROWS):
            return self._read(request)
        self._count(request)
        self._unread.append((Dense(mx.zeros(request.shape, self.dtype)), request))  # never evaluated
        return self._unread[-1][0]

    def _read(self, request: TensorRequest) -> Matrix:
        stored = self.index.checkpoint.stored(request.sources[0])
        if not self.keeps_halves or request.kind == "vector" or stored not in (mx.bfloat16, mx.float16):
            return super()._answer(request)
        usual, self.dtype = self.dtype, cast("mx.Dtype", stored)
        try:
            return super()._answer(request)
        finally:
            self.dtype = usual

    def rows(self, request: TensorRequest, wanted: np.ndarray) -> mx.array:
        """Return rows of an embedding; the `wanted` numbers ascend."""
        first, found = 0, []
        for block in blocks(self.index.checkpoint, request):
            here = wanted[(wanted >= first) & (wanted < first + block.shape[0])] - first
            if here.size:
                found.append(numbers(map_rows(block, lambda rows, here=here: rows[mx.array(here)])).astype(self.dtype))  # type: ignore[misc]
                mx.eval(found[-1])
            first += block.shape[0]
        return mx.concatenate(found)


class StandIn(Packed):
    """Takes the place of a packed matrix. Products pass everything to it, norm, bias and residual included."""

    __slots__ = ()
    data = layout = dtype = precision = None  # type: ignore[assignment]  # none of its own that could be packed or evaluated

    def normed(self, x: mx.array, norm: mx.array, eps: float) -> mx.array:
        """Return the normed rows that are multiplied, `[..., in]`."""
        raise NotImplementedError

    def product(self, x: mx.array, bias: mx.array | None, residual: mx.array | None, experts: mx.array | None) -> mx.array:
        """Multiply normed rows, as `Packed.multiply`."""
        raise NotImplementedError

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
        return self.product(x if norm is None else self.normed(x, norm, eps), bias, residual, experts)


class _EmbeddingRows(StandIn):
    """The rows of an embedding for the tokens of some texts."""

    __slots__ = ("table", "wanted")
    table: mx.array
    wanted: np.ndarray

    def __init__(self, weights: StreamedWeights, request: TensorRequest, texts: Sequence[Batch]) -> None:
        wanted = np.unique([token for batch in texts for token in batch.tokens])
        object.__setattr__(self, "wanted", wanted)
        object.__setattr__(self, "table", weights.rows(request, wanted))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.table.shape)

    def rows(self, indices: mx.array, dtype: mx.Dtype) -> mx.array:
        return self.table[mx.array(np.searchsorted(self.wanted, np.array(indices)))].astype(dtype)


class _Watched(StandIn):
    """A matrix that shows its place the inputs."""

    __slots__ = ("held_out", "matrix", "place")
    matrix: Matrix | Packed
    place: InputRecorder
    held_out: bool

    def __init__(self, matrix: Matrix | Packed, place: InputRecorder) -> None:
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "place", place)
        self.mark(held_out=False)

    def mark(self, *, held_out: bool) -> None:
        """Set the kind of the next inputs."""
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


class _WatchedReader(BlockReader):
    """Shows a watcher the inputs of the matrices of each part."""

    def __init__(
        self, checkpoint: Checkpoint, texts: Sequence[Batch], weights: StreamedWeights, watcher: Watcher, bookmarks: Bookmarks | None
    ) -> None:
        super().__init__(architecture(checkpoint.config), texts, weights.dtype)
        self._weights, self._watcher = weights, watcher
        self._bookmarks = bookmarks if self.states_suffice else None
        kept = self._bookmarks.load() if self._bookmarks else None
        self.parts_done, self.states = kept or (0, [])
        self._asked = 0
        self._embedding = ""
        self._watched: list[_Watched] = []
        self._places: list[tuple[list[str], InputRecorder]] = []

    def check(self, part: object) -> None:
        """Raise `UnsupportedModelError` for a matrix loaded with this part that is not found in it."""
        self._weights.skipping = self.parts < self.parts_done
        asked = list(self._weights.index.requests.values())[self._asked :]
        self._asked += len(asked)
        embeddings = [self._weights.request_of(node).name for node in holders(part) if isinstance(node, Embedding)]
        if isinstance(part, Embedding):
            (self._embedding,) = embeddings
        seen = {*embeddings, *(name for linears in places_of(part) for name in self._names(linears))}
        unseen = [request.name for request in asked if request.kind == "matrix" and request.quantizable and request.name not in seen]
        if unseen:
            raise UnsupportedModelError(
                f"{type(part).__name__} does not show what {', '.join(unseen)} is multiplied with: "
                "use the encoder minmax, which reads no text"
            )

    def prepare(self, part: object) -> None:
        if isinstance(part, OutputLayer):
            return
        for node in holders(part):
            if isinstance(node, Embedding):
                node.matrix = _EmbeddingRows(self._weights, self._weights.request_of(node), self.texts)
        settle(part)
        for linears in places_of(part):
            names = self._names(linears)
            place = self._watcher.recorder(names) if names else None
            if place is not None:
                self._places.append((names, place))
                self._watched.append(_Watched(linears[0].matrix, place))
                linears[0].matrix = self._watched[-1]  # the others read the same input

    def start_batch(self, batch: Batch) -> None:
        for matrix in self._watched:
            matrix.mark(held_out=batch.held_out)

    def finish(self, part: object) -> None:
        if isinstance(part, OutputLayer):
            self._read_head(part)
        drop(part)
        self._watched.clear()
        places, self._places = self._places, []
        if places or isinstance(part, (AnyBlock, LayerInputs)):
            self._watcher.finish(places)
        if self._bookmarks:
            self._bookmarks.save(self.parts, self.states)

    def _names(self, linears: Sequence[Linear]) -> list[str]:
        """Return the tensors multiplied at a place."""
        return [self._weights.stored_name(name) for linear in linears for name in tensors_of(linear)]

    def _read_head(self, part: OutputLayer) -> None:
        names = self._names([part.head]) if part.head else [self._embedding]
        place = self._watcher.recorder(names)
        if place is not None:
            self._places.append((names, place))
            for batch, states in zip(self.texts, self.states, strict=True):
                place.add(part.norm(states), None, 0, batch.held_out)


def places_of(part: object) -> Iterator[list[Linear]]:
    """Yield the products of a part in groups that read the same input, each once, in an order that depends on the graph alone."""
    seen: set[int] = set()
    for node in objects(part):
        if isinstance(node, JoinedLinear):
            seen.update(map(id, node.linears))
            yield list(node.linears)
        elif isinstance(node, Linear) and id(node) not in seen:
            yield [node]


def tensors_of(linear: Linear) -> list[str]:
    """Return the graph's names of the tensors whose rows a product has, in row order; empty if it cannot be quantized."""
    return list(dict.fromkeys(f"{projection.name}.weight" for projection in linear.projections))
