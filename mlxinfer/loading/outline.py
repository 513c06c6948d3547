"""What a model would keep in its cache, from the headers of its checkpoint alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..cache.base import LayerSpec
from ..models import build, supports
from .dtypes import compute_dtype
from .load import model_type, open_checkpoint
from .planned import PlannedWeights
from .resolve import resolve


@dataclass(frozen=True, slots=True)
class Outline:
    """`layers` is None for a model that runs on mlx-lm's graph and cache."""

    name: str
    model_type: str
    dtype: mx.Dtype
    layers: tuple[LayerSpec, ...] | None


def outline(path_or_id: str | Path, dtype: str | mx.Dtype | None = None) -> Outline:
    """Raises `MLXInferError`."""
    found = resolve(path_or_id)
    checkpoint = open_checkpoint(found.path)
    try:
        compute, kind = compute_dtype(checkpoint, dtype), model_type(checkpoint)
        layers = build(checkpoint.config, PlannedWeights(checkpoint, compute)).layers if supports(kind) else None
        return Outline(found.name, kind, compute, layers)
    finally:
        checkpoint.close()
