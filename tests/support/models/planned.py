"""A model as plans of memory see it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxinfer.models.decoder import Model

MB = 2**20


@dataclass(frozen=True)
class Tiny:
    """Implements `Planned`."""

    model: Model
    weight_bytes: int = 10 * MB
    load_bytes: int = 0
    dtype: mx.Dtype = mx.float32
