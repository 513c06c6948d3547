"""mlx-lm's `QuantizedKVCache`, in mlx-lm's own model and attention.

Plain float32 weights, multiplied by this project's CPU kernels where available: MLX's own products would take an hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlxinfer import kernels_cpu

from ..loss import Rows

nn: Any = mlx.nn

CHUNK = 64
SCALE_BITS = 32 / 64
"""Bits of a scale: 16, as on a GPU."""


def logits(folder: Path, ids: list[int], *, bits: int | None) -> Iterator[Rows]:
    """`bits` None: its 16-bit cache. Every layer is quantized, including those with a window, which mlx-lm's own commands refuse."""
    model: Any = load(str(folder))[0]
    if kernels_cpu.in_use():
        _use_kernels(model)
    make: Any = KVCache if bits is None else partial(QuantizedKVCache, group_size=64, bits=bits)
    cache = [make() for _ in model.layers]
    for start in range(0, len(ids), CHUNK):
        rows = model(mx.array(ids[start : start + CHUNK])[None], cache=cache)[0]
        yield np.array(rows.astype(mx.float32))


class _Product:
    def __init__(self, packed: kernels_cpu.Packed) -> None:
        self._packed = packed

    def __call__(self, x: mx.array) -> mx.array:
        return self._packed.multiply(x)


class _Rows(_Product):
    def __call__(self, x: mx.array) -> mx.array:
        return self._packed.rows(x, mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        return self._packed.multiply(x)


def _use_kernels(model: Any) -> None:
    replaced = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            matrix = kernels_cpu.pack(
                module.weight, module.scales, module.get("biases"), group_size=module.group_size, bits=module.bits, mode=module.mode,
                precision="float32",
            )  # fmt: skip
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            matrix = kernels_cpu.pack(module.weight)
        else:
            continue
        assert "bias" not in module, name
        replaced.append((name, (_Rows if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)) else _Product)(matrix)))
    for name, module in replaced:
        parent, _, last = name.rpartition(".")
        node = model
        for part in parent.split("."):
            node = node[int(part)] if part.isdigit() else getattr(node, part)
        setattr(node, last, module)
