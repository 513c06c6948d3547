"""What a model would keep in its cache, from the headers of its checkpoint alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..models import Model, build, supports
from ..nn.weights import Format
from .dtypes import compute_dtype
from .load import model_type, open_checkpoint
from .memory import tensor_bytes
from .planned import PlannedWeights
from .resolve import resolve


@dataclass(frozen=True, slots=True)
class Outline:
    """`model` has no weights, and takes `weight_bytes` once it has; it is None where it runs on mlx-lm's graph and cache."""

    name: str
    model_type: str
    dtype: mx.Dtype
    model: Model | None
    weight_bytes: int = 0


def outline(path_or_id: str | Path, dtype: str | mx.Dtype | None = None, quantize: Format | None = None) -> Outline:
    """Raises `MLXInferError`."""
    found = resolve(path_or_id)
    checkpoint = open_checkpoint(found.path, in_file=quantize is None)
    try:
        compute, kind = compute_dtype(checkpoint, dtype), model_type(checkpoint)
        if not supports(kind):
            return Outline(found.name, kind, compute, None)
        planned = PlannedWeights(checkpoint, compute)
        model = build(checkpoint.config, planned)
        weights = sum(tensor_bytes(tensor, compute, quantize) for tensor in planned.tensors.values())
        return Outline(found.name, kind, compute, model, weights)
    finally:
        checkpoint.close()
