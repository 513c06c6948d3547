"""Loading as on a machine whose default device is a GPU, computed by MLX on the CPU."""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
import pytest

from mlxinfer.loading import formats, load, weights
from mlxinfer.nn import packing


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, blocks: Collection[str] = ()) -> None:
    """Until the end of the test; the machine multiplies these block types of GGUF well."""
    for module in (load, weights, packing):
        monkeypatch.setattr(module, "is_gpu", lambda: True)
    monkeypatch.setattr(formats, "default_dtype", lambda: mx.bfloat16)
    monkeypatch.setattr(load, "block_kinds", lambda dtype, kinds: frozenset(blocks) & frozenset(kinds))
