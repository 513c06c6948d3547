"""Models whose architecture only mlx-lm has: its graph, with the weights of our checkpoints."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import UnsupportedModelError, WeightsError
from ..models.decoder import Model
from ..models.fallback import mlx_lm as zoo
from ..nn.weights import Blocks, Dense, Quantized, RawBlocks, numbers
from .checkpoint import Checkpoint
from .directory import SafetensorsCheckpoint
from .formats import MODES
from .prepared_model import PreparedModel
from .weights import Progress, is_finite_array, outline


class BorrowedModel(PreparedModel):
    """A model on mlx-lm's graph."""

    borrowed = True

    def __init__(self, name: str, checkpoint: Checkpoint, dtype: mx.Dtype) -> None:
        """Raises `UnsupportedModelError`, `WeightsError`."""
        zoo.check_supported(checkpoint.config)
        if isinstance(checkpoint, SafetensorsCheckpoint) and checkpoint.is_foreign:
            raise UnsupportedModelError(
                f"{checkpoint.path}: its quantization can be read, but not by mlx-lm's graph of {checkpoint.config['model_type']}"
            )
        self._lazy = isinstance(checkpoint, SafetensorsCheckpoint)
        tensors = checkpoint.lazy() if isinstance(checkpoint, SafetensorsCheckpoint) else _outline_tensors(checkpoint)
        self._model = zoo.build(checkpoint.config, tensors, dtype)
        super().__init__(name, checkpoint, dtype, cast(Model, self._model), [array.nbytes for _, array in _parameters(self._model)])

    def read_weights(self, progress: Progress | None, experts: object = None) -> tuple[Model, list[str]]:
        """Read and evaluate one tensor at a time. Raises `WeightsError` for NaN and infinite values."""
        # A GGUF file has no lazy tensors: the graph is built again on the real ones.
        model = self._model if self._lazy else zoo.build(self.checkpoint.config, _read_tensors(self.checkpoint), self.dtype)
        done = 0
        for name, array in _parameters(model):
            mx.eval(array)
            if not is_finite_array(array):
                raise WeightsError(f"{self.checkpoint.path}: {name} holds NaN or infinite values")
            done += array.nbytes
            if progress:
                progress(done, self.weight_bytes)
        return cast(Model, model), []


def _parameters(model: zoo.FallbackModel) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.model.parameters())  # type: ignore[return-value]


def _outline_tensors(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """As `_tensors`, zeros that are never evaluated."""
    tensors: dict[str, mx.array] = {}
    for name in checkpoint.names():
        matrix = outline(checkpoint, name)
        if isinstance(matrix, Quantized) and matrix.format.mode not in MODES:
            matrix = Dense(mx.zeros(checkpoint.shape(name)))
        tensors |= _stored_parts(name, matrix)
    return tensors


def _read_tensors(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Under their names in the file, packed ones in parts."""
    tensors: dict[str, mx.array] = {}
    for name in checkpoint.names():
        matrix = checkpoint.read(name)
        tensors |= _stored_parts(name, Dense(numbers(matrix)) if isinstance(matrix, (RawBlocks, Blocks)) else matrix)
    return tensors


def _stored_parts(name: str, matrix: Dense | Quantized) -> dict[str, mx.array]:
    base, parts = name.removesuffix("weight"), {name: matrix.weight}
    if isinstance(matrix, Quantized):
        parts[base + "scales"] = matrix.scales
        if matrix.biases is not None:
            parts[base + "biases"] = matrix.biases
    return parts
