"""Arguments of MLX's product with gathered matrices.

Its CUDA kernel takes rows with the stride of the second last axis, and contiguous matrices, whatever the strides of the array say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models import families
from support.models.families import GOLDEN, Pages, config, reference
from support.models.plain_weights import PlainWeights

from mlxinfer.models import build


def strides(x: mx.array) -> tuple[int, ...]:
    """In numbers, where the array is on the device."""
    return tuple(s // x.itemsize for s in memoryview(x).strides or ())


@pytest.mark.parametrize("name", ["qwen3_moe", "minicpm3"])
def test_rows_and_matrices_lie_without_gaps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product: Callable[..., mx.array] = mx.gather_mm
    seen = []

    def checked(x: mx.array, matrices: mx.array, **settings: Any) -> mx.array:
        mx.eval(x, matrices)
        seen.append((strides(x)[-2] == x.shape[-1], strides(matrices)[0] == matrices.shape[1] * matrices.shape[2]))
        return product(x, matrices, **settings)

    monkeypatch.setattr(mx, "gather_mm", checked)
    # Not packed for the CPU kernels, which would multiply instead.
    model = build(config(name), PlainWeights.open(GOLDEN / name / "model.safetensors"))
    monkeypatch.setattr(families, "loaded_model", lambda name: model)
    pages, (tokens, logits, *_) = Pages(name), reference(name)
    (found,) = pages.read((pages.open(), [int(token) for token in tokens]))
    assert seen
    assert set(seen) == {(True, True)}
    np.testing.assert_allclose(found, logits, atol=2e-3)
