"""Models whose architecture only mlx-lm has: its graph, with the weights of our checkpoints."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..device import device_memory
from ..errors import MemoryPlanError, UnsupportedModelError, WeightsError
from ..models import mlx_lm_fallback as zoo
from ..models.decoder import Model
from ..nn.weights import Quantized, RawBlocks, numbers
from .checkpoint import Checkpoint
from .directory import SafetensorsCheckpoint
from .weights import Progress, is_finite_array


def check_borrowed(checkpoint: Checkpoint) -> None:
    """Raise `UnsupportedModelError` where mlx-lm does not know the architecture either."""
    if not zoo.supports(checkpoint.config):
        raise UnsupportedModelError(f"architecture {checkpoint.config.get('model_type')!r} is supported neither here nor by mlx-lm")


def load_borrowed(checkpoint: Checkpoint, dtype: mx.Dtype, progress: Progress | None = None) -> Model:
    """Evaluated, a tensor at a time. Raises `UnsupportedModelError`, `WeightsError`, `MemoryPlanError`."""
    # The tensors must not be kept beside the parameters that are made of them.
    model = zoo.build(checkpoint.config, _tensors(checkpoint), dtype)
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.model.parameters())  # type: ignore[assignment]
    needed, usable, done = sum(array.nbytes for _, array in parameters), device_memory().usable, 0
    if needed > usable:
        raise MemoryPlanError(f"the weights take {needed / 2**30:.1f} GiB, but this device can use {usable / 2**30:.1f} GiB")
    for name, array in parameters:
        mx.eval(array)
        if not is_finite_array(array):
            raise WeightsError(f"{checkpoint.path}: {name} holds NaN or infinite values")
        done += array.nbytes
        if progress:
            progress(done, needed)
    return cast(Model, model)


def _tensors(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Under their names in the file, packed ones in parts; not evaluated yet where the format allows."""
    if isinstance(checkpoint, SafetensorsCheckpoint):
        return checkpoint.lazy()
    tensors = {}
    for name in checkpoint.names():
        matrix, base = checkpoint.read(name), name.removesuffix("weight")
        tensors[name] = numbers(matrix) if isinstance(matrix, RawBlocks) else matrix.weight
        if isinstance(matrix, Quantized):
            tensors[base + "scales"] = matrix.scales
            if matrix.biases is not None:
                tensors[base + "biases"] = matrix.biases
    return tensors
