"""The weights of a model, read from a checkpoint one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx

from .. import kernels_cpu
from ..errors import WeightsError
from ..nn.packing import arrays
from ..nn.weights import FLOAT8, Blocks, Dense, Format, Matrix, Quantized, RawBlocks, Recipe
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from .checkpoint import Checkpoint
from .formats import FIXED, dtype_name, loses_precision, packed_shapes
from .gguf.types import BLOCK_BYTES
from .skipped import reason_to_skip

Kind = Literal["matrix", "vector"]
_LISTED = 12
_MOST_BLOCK_SCALE = 4
"""Maximum bytes per group for scale and offset, after the CPU kernels have packed a GGUF file's blocks."""


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A tensor that a graph has requested, and its sources in the checkpoint."""

    name: str
    """Name in the graph."""
    shape: tuple[int, ...]
    """Shape in the graph."""
    kind: Kind
    """"matrix" or "vector"; vectors are never quantized."""
    quantizable: bool
    """True if the graph accepts it quantized."""
    dtype: mx.Dtype | None
    """Required dtype; None for that of the activations."""
    sources: tuple[str, ...]
    """Tensors of the checkpoint that it is made from."""
    recipe: Recipe | None
    """Makes it from `sources`; None if it is `sources[0]` unchanged."""

    def dtype_of(self, stored: mx.Dtype, dtype: mx.Dtype) -> mx.Dtype:
        """The dtype in memory of a plain tensor that is stored as `stored`, for activations in `dtype`.

        The CPU kernels multiply float32 rows with 16-bit matrices, with the same sums: such a matrix stays as stored.
        """
        stays = self.kind == "matrix" and dtype == mx.float32 and stored in (mx.bfloat16, mx.float16) and kernels_cpu.in_use()
        return stored if stays else self.dtype or dtype

    def quantized_to(self, quantize: Format | None) -> Format | None:
        """Return `quantize` if a plain tensor is quantized: the graph allows it, and its rows divide into whole groups. Else None."""
        return quantize if quantize and self.quantizable and can_quantize(self.shape, quantize) else None


_LARGEST_SIZE = 2**28
"""Maximum rows or columns of a matrix. MLX counts them in 32 bits, also of joined matrices."""


Reason = Callable[[str, Mapping[str, Any]], str | None]
"""Takes the name of an unused tensor and the config; returns the reason to leave it out, or None."""


class TensorIndex:
    """Records every request, every used tensor, and every problem."""

    def __init__(self, checkpoint: Checkpoint, names: Collection[str] | None = None, reason: Reason = reason_to_skip) -> None:
        """`names` limits the index to a part of the checkpoint. `reason` says why a tensor may stay unused."""
        self.checkpoint = checkpoint
        self.requests: dict[str, TensorRequest] = {}
        self.skipped: dict[str, str] = {}
        self._listed = checkpoint.names() if names is None else names
        self._names = frozenset(self._listed)
        self._reason = reason
        self._used: set[str] = set()
        self._problems: list[str] = []

    def has(self, name: str) -> bool:
        return name in self._names

    @property
    def used(self) -> frozenset[str]:
        """Tensors that were requested, by their names in the checkpoint."""
        return frozenset(self._used)

    def leave(self, names: Collection[str]) -> None:
        """Count tensors as used: another graph reads them."""
        self._used.update(names)
        for name in names:
            self.skipped.pop(name, None)

    def add_problem(self, problem: str) -> None:
        self._problems.append(problem)

    def find(
        self, name: str, shape: tuple[int, ...], kind: Kind, otherwise: Sequence[Recipe], quantizable: bool, dtype: mx.Dtype | None
    ) -> TensorRequest | None:
        """Find the sources of a tensor. None if there are none, which `finish` then reports as a problem.

        A recipe applies if the tensor is absent or has another shape. A recipe that reads the tensor itself takes precedence: the model
        gives one if the stored values are not those of the graph.
        """
        known = self.requests.get(name)
        if known and (known.shape, known.kind, known.dtype) == (shape, kind, dtype):
            return known
        if max(shape, default=0) > _LARGEST_SIZE:
            raise WeightsError(f"{self.checkpoint.path}: {name} would have the shape {list(shape)}; a number in the config is wrong")
        whole = name in self._names and self.checkpoint.shape(name) == shape
        recipe = next((r for r in otherwise if self._applies(r) and (not whole or name in r.sources)), None)
        if recipe is None and not whole:
            self._report(name, shape, otherwise)
            return None
        if recipe is None and not self._readable(name, kind):
            return None
        sources = (name,) if recipe is None else recipe.sources
        self._used.update(sources)
        request = TensorRequest(name, shape, kind, quantizable, dtype, sources, recipe)
        self.requests[name] = request
        return request

    def finish(self) -> None:
        """Raise `WeightsError` with every problem and every unused tensor that has no reason."""
        for name in self._listed:
            if name not in self._used:
                reason = self._reason(name, self.checkpoint.config) or self._reason_for_bias(name)
                if reason is None:
                    self.add_problem(f"{name} is unexpected")
                else:
                    self.skipped[name] = reason
        self.check()

    def check(self) -> None:
        """Raise `WeightsError` with every problem so far."""
        if self._problems:
            more = len(self._problems) - _LISTED
            listed = "; ".join(self._problems[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
            raise WeightsError(f"{self.checkpoint.path}: {listed}")

    def _reason_for_bias(self, name: str) -> str | None:
        """The reason to skip a bias of zeros, which AutoGPTQ writes for matrices of models without biases."""
        checkpoint, matrix = self.checkpoint, name.removesuffix("bias") + "weight"
        if not name.endswith(".bias") or matrix not in self._names or len(checkpoint.shape(name)) != 1:
            return None
        bias = checkpoint.read(name)
        return "a bias of zeros" if isinstance(bias, Dense) and not mx.any(bias.weight).item() else None

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


Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""


class _IndexedWeights:
    """Base of `Weights` on a checkpoint: each request goes through the index, then to `_answer`."""

    def __init__(self, index: TensorIndex, dtype: mx.Dtype) -> None:
        self.index = index
        self.dtype = dtype

    def has(self, name: str) -> bool:
        return self.index.has(name)

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        return self._get(name, shape, "matrix", otherwise, quantizable, None)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        matrix = self._get(name, shape, "vector", otherwise, False, dtype)
        assert isinstance(matrix, Dense)
        return matrix.weight

    def finish(self) -> None:
        """Raise `WeightsError` with every problem found, and every tensor that the graph did not request."""
        self.index.finish()

    def _get(
        self, name: str, shape: tuple[int, ...], kind: Kind, otherwise: Sequence[Recipe], quantizable: bool, dtype: mx.Dtype | None
    ) -> Matrix:
        request = self.index.find(name, shape, kind, otherwise, quantizable, dtype)
        return Dense(mx.zeros(shape, dtype or self.dtype)) if request is None else self._answer(request)

    def _answer(self, request: TensorRequest) -> Matrix:
        raise NotImplementedError


class CheckpointWeights(_IndexedWeights):
    """Implements `Weights`: reads a tensor on request, applies its recipe, casts it to `dtype` and evaluates it.

    `quantize` is the format for matrices that are stored plain and may be quantized. `scales` is the dtype of affine scales; None for
    `dtype`. Missing tensors come as zeros, and `finish` raises all problems in one `WeightsError`. `index` is that of a `MetaWeights` on
    which the same graph was built: its answers are used again.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: mx.Dtype,
        *,
        quantize: Format | None = None,
        scales: mx.Dtype | None = None,
        progress: Progress | None = None,
        index: TensorIndex | None = None,
        reads: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`reads` is False for names in the graph that are not read: they come as zeros that are never evaluated."""
        super().__init__(index or TensorIndex(checkpoint), dtype)
        self._reads = reads
        self._scales = scales
        self.rounded: dict[str, str] = {}
        """Tensors whose cast to `dtype` may have lost precision, with their stored dtype."""
        self._quantize = quantize
        self._progress = progress
        self._total = sum(checkpoint.nbytes(name) for name in checkpoint.names()) if progress else 0
        self.read_bytes = 0
        """Bytes of the checkpoint that were read, or passed over."""

    def _answer(self, request: TensorRequest) -> Matrix:
        if not self._reads(request.name):
            self._count(request)
            return outline_of(self.index, request, self.dtype)
        matrix = make(self.index, request, [self.index.checkpoint.read(source) for source in request.sources])
        packed = request.quantized_to(self._quantize) if isinstance(matrix, Dense) else None
        target = request.dtype or self.dtype
        if isinstance(matrix, Dense) and not packed:
            target = request.dtype_of(matrix.weight.dtype, self.dtype)
        if not is_finite(matrix):
            self.index.add_problem(f"{request.name} holds NaN or infinite values")
        self._count(request)
        if self._scales and isinstance(matrix, Quantized):
            matrix = self._with_scales(request, matrix, self._scales)
        else:
            self._note_rounding(request.name, matrix, target)
            matrix = cast(matrix, target)
        return evaluate(quantize(matrix.weight, packed) if packed and isinstance(matrix, Dense) else matrix)

    def _count(self, request: TensorRequest) -> None:
        self.read_bytes += sum(self.index.checkpoint.nbytes(source) for source in request.sources)
        if self._progress:
            self._progress(min(self.read_bytes, self._total), self._total)

    def _with_scales(self, request: TensorRequest, matrix: Quantized, dtype: mx.Dtype) -> Matrix:
        rounded = cast(matrix, dtype)
        if is_finite(matrix) and not is_finite(rounded):
            self.index.add_problem(f"{request.name} has scales that leave the range of {dtype_name(dtype)}: load it with dtype float32")
        return rounded

    def _note_rounding(self, name: str, matrix: Matrix, target: mx.Dtype) -> None:
        if isinstance(matrix, RawBlocks):
            return
        stored = matrix.scales.dtype if isinstance(matrix, Quantized) else matrix.weight.dtype
        if loses_precision(stored, target):
            self.rounded[name] = dtype_name(stored)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of a model that is not loaded yet."""

    request: TensorRequest
    stored: Format | mx.Dtype
    """Format or dtype of the tensor as made from its sources."""
    quantized: Format | None
    """Format that it is quantized to while it is loaded; None if it stays as stored."""
    nbytes: int

    @classmethod
    def of(cls, request: TensorRequest, stored: Format | mx.Dtype, dtype: mx.Dtype, quantize: Format | None) -> PlannedTensor:
        """Plan a tensor for activations in `dtype`, in a model that is quantized to `quantize`."""
        quantized = None if isinstance(stored, Format) else request.quantized_to(quantize)
        form, count = quantized or stored, math.prod(request.shape)
        if not isinstance(form, Format):
            return cls(request, stored, quantized, count * request.dtype_of(form, dtype).size)
        if is_gpu() and form.mode in BLOCK_BYTES:
            return cls(request, stored, quantized, math.ceil(count * BLOCK_BYTES[form.mode]))
        scale = 2 * dtype.size if form.mode == "affine" else 1 if form.mode in FIXED else _MOST_BLOCK_SCALE
        return cls(request, stored, quantized, count * form.bits // 8 + count // form.group_size * scale)


class MetaWeights(_IndexedWeights):
    """Implements `Weights` without reading: every tensor is an array of zeros that is never evaluated.

    Build a model on it to check a checkpoint (`finish` raises `WeightsError`), to plan its memory, or to find the tensors that a
    conversion has to write.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: mx.Dtype = mx.float32,
        quantize: Format | None = None,
        index: TensorIndex | None = None,
    ) -> None:
        super().__init__(index or TensorIndex(checkpoint), dtype)
        self._quantize = quantize
        self.tensors: dict[str, PlannedTensor] = {}
        self.nbytes = 0
        """Bytes in memory of all tensors that were requested so far."""

    @property
    def skipped(self) -> dict[str, str]:
        """After `finish`: unused tensors, with the reason."""
        return self.index.skipped

    def _answer(self, request: TensorRequest) -> Matrix:
        matrix = _made_outline(self.index, request)
        stored = matrix.weight.dtype if isinstance(matrix, Dense) else matrix.format
        planned = PlannedTensor.of(request, stored, self.dtype, self._quantize)
        self.nbytes += planned.nbytes - (self.tensors[request.name].nbytes if request.name in self.tensors else 0)
        self.tensors[request.name] = planned
        return _cast_outline(matrix, request, self.dtype)


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
            return Dense(self._noted(name, _zeros(shape, mx.bfloat16)))
        packed, groups = packed_shapes(shape, form)
        codes, scales, biases = _zeros(packed, mx.uint32), _zeros(groups, mx.bfloat16), _zeros(groups, mx.bfloat16)
        self._sizes[name] = codes.nbytes + scales.nbytes + biases.nbytes
        return Quantized(codes, scales, biases, form)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        return self._noted(name, _zeros(shape, dtype or mx.bfloat16))

    def _noted(self, name: str, array: mx.array) -> mx.array:
        self._sizes[name] = array.nbytes
        return array


def _zeros(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Zeros with the memory of one number."""
    return mx.broadcast_to(mx.zeros((), dtype), tuple(shape))


def outline_of(index: TensorIndex, request: TensorRequest, dtype: mx.Dtype) -> Matrix:
    """Return zeros, never evaluated, in place of a tensor for activations in `dtype`."""
    return _cast_outline(_made_outline(index, request), request, dtype)


def _made_outline(index: TensorIndex, request: TensorRequest) -> Matrix:
    return make(index, request, [outline(index.checkpoint, source) for source in request.sources])


def _cast_outline(matrix: Matrix, request: TensorRequest, dtype: mx.Dtype) -> Matrix:
    return cast(matrix, request.dtype_of(matrix.weight.dtype, dtype) if isinstance(matrix, Dense) else dtype)


def outline(checkpoint: Checkpoint, name: str) -> Dense | Quantized:
    """Zeros, never evaluated, with the shape and dtype of `checkpoint.read`. Raw blocks come in a packed form of their size."""
    stored, shape = checkpoint.stored(name), checkpoint.shape(name)
    if not isinstance(stored, Format):
        return Dense(mx.zeros(shape, stored))
    packed, groups = packed_shapes(shape, stored)
    affine = stored.mode == "affine"
    scales = mx.zeros(groups, mx.float16 if affine else mx.float32 if stored.mode == FLOAT8 else mx.uint8)
    return Quantized(mx.zeros(packed, mx.uint32), scales, mx.zeros(groups, mx.float16) if affine else None, stored)


def make(index: TensorIndex, request: TensorRequest, sources: list[Matrix]) -> Matrix:
    """Make the tensor that the graph requested from its sources. A failure gives zeros, and a problem in the index."""
    try:
        matrix = sources[0] if request.recipe is None else request.recipe.make(sources)
    except ValueError as error:
        index.add_problem(f"{request.name} cannot be made from {request.sources[0]}: {error}")
        return Dense(mx.zeros(request.shape))
    if matrix.shape != request.shape:
        index.add_problem(f"{request.name}, made from {request.sources[0]}, has shape {list(matrix.shape)}, expected {list(request.shape)}")
        return Dense(mx.zeros(request.shape))
    if request.kind == "vector" and not isinstance(matrix, Dense):
        index.add_problem(f"{request.name} is quantized, which is not understood for this tensor")
        return Dense(mx.zeros(request.shape))
    return matrix


def cast(matrix: Matrix, dtype: mx.Dtype) -> Matrix:
    """Cast the floating-point parts. Codes and 8-bit scales stay unchanged."""
    if isinstance(matrix, Dense):
        return Dense(matrix.weight.astype(dtype))
    if isinstance(matrix, (RawBlocks, Blocks)) or matrix.biases is None:
        return matrix
    return Quantized(matrix.weight, matrix.scales.astype(dtype), matrix.biases.astype(dtype), matrix.format)


def can_quantize(shape: tuple[int, ...], form: Format) -> bool:
    return len(shape) >= 2 and shape[-1] % form.group_size == 0


def quantize(weight: mx.array, form: Format) -> Quantized:
    """Quantize a matrix with MLX's own method; scales have the dtype of the weight."""
    parts = mx.quantize(weight, group_size=form.group_size, bits=form.bits, mode=form.mode)
    return Quantized(parts[0], parts[1], parts[2] if len(parts) > 2 else None, form)


def evaluate(matrix: Matrix) -> Matrix:
    """Evaluate a matrix, so that its sources leave memory."""
    mx.eval(*arrays(matrix))
    return matrix


def is_finite(matrix: Matrix) -> bool:
    """False if any value is NaN or infinite; for 8-bit scales, which have no infinity, if any is NaN.

    Blocks that are still in their file are checked when they are packed.
    """
    if isinstance(matrix, (RawBlocks, Blocks)):
        return True
    if isinstance(matrix, Dense):
        return is_finite_array(matrix.weight)
    if matrix.format.mode == FLOAT8:  # its codes were checked when they were read
        return is_finite_array(matrix.scales)
    if matrix.biases is not None:
        return is_finite_array(matrix.scales) and is_finite_array(matrix.biases)
    nan = 0xFF if matrix.format.mode.startswith("mx") else 0x7F
    return not mx.any((matrix.scales & 0x7F if nan == 0x7F else matrix.scales) == nan).item()


def is_finite_array(array: mx.array) -> bool:
    """False if any value is NaN or infinite."""
    # Extremes propagate a NaN, and unlike a sum they cannot overflow.
    if not array.size or not mx.issubdtype(array.dtype, mx.floating):
        return True
    extremes = mx.max(array), mx.min(array)
    mx.eval(extremes)
    return all(math.isfinite(extreme.item()) for extreme in extremes)  # type: ignore[arg-type]  # a float
