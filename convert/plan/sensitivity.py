"""Cost of an error in each matrix for the model's predictions, from one forward and one backward pass over a text.

To second order, an error E of a matrix causes a KL divergence of half the mean of `(g . E x)^2`. Here x is an input. g is the gradient of a
token's log-probability with respect to the output, for tokens drawn from the model itself (the Fisher information). Separated into inputs
and outputs, this is `sum over rows r of w_r E_r C E_r^T / 2`, with `C = mean(|g|^2 x x^T)` and w the share of each output in |g|^2. The
costs of several matrices add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ... import kernels_cpu
from ...cache.base import AttentionSpec
from ...errors import ConversionError
from ...kernels_cpu import Packed
from ...loading.checkpoint import Checkpoint
from ...loading.weights import Progress
from ...models import architecture
from ...models.block import AnyBlock
from ...models.blockwise import Batch, batches
from ...nn.norms import RMSNorm
from ...nn.packing import objects
from ...nn.weights import Matrix, RawBlocks, numbers
from ...util.device import default_dtype, is_gpu
from ..calibrate.blockwise import InputRecorder, StandIn, StreamedWeights, load_part, places_of, read_through, tensors_of
from ..calibrate.differentiable_step import DifferentiableStep, linear
from ..encode.gptq import add_gram, to_numpy
from .head_cost import FinalStates


@dataclass(slots=True)
class Sensitivity:
    """Statistics of matrices that read one input in one product."""

    names: list[str]
    """Names of the tensors, in row order."""
    curvature: np.ndarray
    """C, float32 `[in, in]`, of all experts together."""
    rows: np.ndarray
    """Share of each output, float32 `[out of all tensors]`; the sum is 1."""
    importance: mx.array
    """Mean square of each input for the weighted fit, float32 `[in]`."""


class Sensitivities:
    """Sensitivities of a whole model on some texts."""

    def __init__(self, checkpoint: Checkpoint, states: list[list[mx.array]], texts: list[Batch]) -> None:
        """Create them from the `states` of the texts after every part of the model."""
        self.final = FinalStates(checkpoint, states.pop())
        """Inputs of the head, whose cost is measured instead of estimated."""
        self.tokens = [token for batch in texts for token in batch.tokens]
        """Tokens of the texts."""
        self.embedding = np.zeros(0)
        """Mean square of the gradient with respect to each channel of the embeddings, float32 `[hidden]`; set after `places`."""
        self._checkpoint, self._states, self._texts = checkpoint, states, texts

    def places(self) -> Iterator[list[list[Sensitivity]]]:
        """Yield the sensitivities block by block, last block first, grouped by shared input. Works once, because states are dropped."""
        back, gradients = _Back(self._checkpoint, self._texts), self.final.gradients()
        self._states.pop()  # after the last block: `final` has them
        for number in range(architecture(self._checkpoint.config).sizes.layers, 0, -1):
            gradients, found = back.through(number, self._states.pop(), gradients)
            yield found
            mx.clear_cache()
        scale = architecture(self._checkpoint.config).embedding_scale
        self.embedding = np.concatenate([np.square(to_numpy(each) * scale) for each in gradients]).mean(0)


def sensitivities(
    checkpoint: Checkpoint, forward: Checkpoint, texts: Sequence[Sequence[int]], progress: Progress | None = None
) -> Sensitivities:
    """Return the cost of errors in each matrix on these texts (token ids). `forward` is the checkpoint opened for computing.

    Memory has one block, and the states of the texts between all blocks. Raises `MLXInferError`.
    """
    _check_family(forward)
    read = batches(texts)
    kept = _States()
    read_through(forward, read, _Nothing(), progress, kept)
    return Sensitivities(checkpoint, kept.states, read)


def _check_family(checkpoint: Checkpoint) -> None:
    """Raise `ConversionError` for a model without gradients here: its blocks get more than the residual stream."""
    plan = architecture(checkpoint.config)
    shares = any(isinstance(spec, AttentionSpec) and spec.shared for spec in plan.specs)
    if plan.inputs is not None or shares:
        family = checkpoint.config["model_type"]
        raise ConversionError(f"a budget of bits cannot be planned for {family}: give --bits, or a plan of your own with --plan")


class _Nothing:
    """A `Watcher` that ignores all places."""

    def recorder(self, names: list[str]) -> InputRecorder | None:
        return None

    def finish(self, places: list[tuple[list[str], InputRecorder]]) -> None: ...


class _States:
    """`Bookmarks` that keep the states after every part: embedding, each block, and the states after the last block again."""

    def __init__(self) -> None:
        self.states: list[list[mx.array]] = []

    def load(self) -> None:
        return None

    def save(self, parts: int, states: list[mx.array]) -> None:
        self.states.append(list(states))


class _Back:
    """Propagates gradients back through one block after another."""

    def __init__(self, checkpoint: Checkpoint, texts: list[Batch]) -> None:
        self._checkpoint, self._texts = checkpoint, texts
        self._plan = architecture(checkpoint.config)

    def through(self, number: int, states: list[mx.array], gradients: list[mx.array]) -> tuple[list[mx.array], list[list[Sensitivity]]]:
        """Return gradients by the inputs of part `number`, from those by its outputs, and the sensitivities of its matrices."""
        block, weights = load_part(self._checkpoint, number)
        assert isinstance(block, AnyBlock)
        taps = make_differentiable(block, weights)
        before = []
        for batch, x, gradient in zip(self._texts, states, gradients, strict=True):
            step = DifferentiableStep(self._plan.specs, [len(text) for text in batch.texts])
            rotations = {name: rope.at(step) for name, rope in self._plan.ropes.items()}
            _, found = mx.vjp(lambda x, step=step, rotations=rotations: block(x, step, rotations), [x], [gradient])
            mx.eval(found)
            before.append(found[0])
            for tap in (tap for place in taps for tap in place):
                tap.record.collect()
        count = sum(len(batch.tokens) for batch in self._texts)
        return before, [[tap.record.result(count) for tap in place] for place in taps]


@dataclass(slots=True)
class _ProductRecord:
    """Statistics of one product, summed over batches."""

    names: list[str]
    curvature: np.ndarray
    """float32 `[in, in]`."""
    rows: np.ndarray
    """Squared gradients of each output."""
    squares: np.ndarray
    """Squared inputs."""
    count: int = 0
    """Number of inputs."""
    x: mx.array | None = None
    gradient: mx.array | None = None

    def collect(self) -> None:
        """Add the statistics of the last batch."""
        assert self.x is not None
        assert self.gradient is not None
        gradient, seen = self.gradient, self.x
        x = mx.broadcast_to(seen, (*gradient.shape[:-1], seen.shape[-1])).reshape(-1, seen.shape[-1]).astype(mx.float32)
        squares = mx.square(gradient.reshape(-1, gradient.shape[-1]).astype(mx.float32))
        add_gram(self.curvature, x * mx.sqrt(squares.sum(-1, keepdims=True)))
        self.rows += np.array(squares.sum(0))
        self.squares += np.array(mx.square(x).sum(0))
        self.count += x.shape[0]
        self.x = self.gradient = None

    def take(self, gradient: mx.array) -> mx.array:
        """Store the gradient in the backward pass."""
        self.gradient = gradient
        return gradient

    def result(self, tokens: int) -> Sensitivity:
        """Return the sensitivity over all batches, with `tokens` tokens in total."""
        rows = self.rows / max(self.rows.sum(), 1e-30)
        importance = mx.array((self.squares / max(self.count, 1)).astype(np.float32))
        return Sensitivity(self.names, self.curvature / tokens, rows.astype(np.float32), importance)


class _RecordedMatrix(StandIn):
    """A matrix with differentiable products that records their inputs and the gradients of their outputs."""

    __slots__ = ("matrix", "plain", "record")
    matrix: mx.array
    plain: Callable[[mx.array], mx.array]
    record: _ProductRecord

    def __init__(self, matrix: mx.array, names: list[str]) -> None:
        rows, size = matrix.shape[-2:]
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "plain", _product(matrix))
        object.__setattr__(self, "record", _ProductRecord(names, np.zeros((size, size), np.float32), np.zeros(rows), np.zeros(size)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    def normed(self, x: mx.array, norm: mx.array, eps: float) -> mx.array:
        return mx.fast.rms_norm(x, norm, eps)

    def product(self, x: mx.array, bias: mx.array | None, residual: mx.array | None, experts: mx.array | None) -> mx.array:
        y = self.plain(x) if experts is None else mx.gather_mm(x, self.matrix.swapaxes(-1, -2), rhs_indices=experts)
        self.record.x = mx.stop_gradient(x)
        y = linear(lambda y: y * 1, self.record.take)(y)
        y = y if experts is None else y.squeeze(-2)
        if bias is not None:
            y = y + (bias if experts is None else bias[experts])
        return y if residual is None else y + residual


def _product(matrix: mx.array) -> Callable[[mx.array], mx.array]:
    if is_gpu() or matrix.ndim > 2 or not kernels_cpu.in_use():
        return lambda x: x @ matrix.T
    forward, back = kernels_cpu.pack(matrix), kernels_cpu.pack(mx.contiguous(matrix.T))
    return linear(forward.multiply, back.multiply)


def make_differentiable(block: AnyBlock, weights: StreamedWeights) -> list[list[_RecordedMatrix]]:
    """Make a block differentiable, and return the recording matrices."""
    joined = list(places_of(block))
    taps: list[list[_RecordedMatrix]] = []
    for linears in joined:
        taps.append([])
        for each in linears:
            taps[-1].append(_RecordedMatrix(_dequantized(each.matrix), [weights.stored_name(name) for name in tensors_of(each)]))
            each.matrix = taps[-1][-1]
    for node in objects(block):
        if isinstance(node, RMSNorm):
            node.in_plain_operations()
    return taps


def _dequantized(matrix: Matrix | Packed) -> mx.array:
    assert not isinstance(matrix, Packed)
    found = matrix.dequantize(default_dtype()) if isinstance(matrix, RawBlocks) else numbers(matrix).astype(default_dtype())
    mx.eval(found)
    return found
