"""The floating-point dtypes that a model computes and is stored in."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx

from ..device import default_dtype
from ..errors import UnsupportedModelError
from .checkpoint import Checkpoint

_NAMES = {
    "float32": mx.float32, "fp32": mx.float32, "f32": mx.float32,
    "float16": mx.float16, "fp16": mx.float16, "f16": mx.float16,
    "bfloat16": mx.bfloat16, "bf16": mx.bfloat16,
}  # fmt: skip
_MANTISSA = {mx.float32: 23, mx.float16: 10, mx.bfloat16: 7}


def parse_dtype(dtype: str | mx.Dtype) -> mx.Dtype:
    """`"bfloat16"`, `"bf16"` or `mx.bfloat16`. Raises `UnsupportedModelError`."""
    found = _NAMES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _MANTISSA:
        raise UnsupportedModelError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
    return found


def dtype_name(dtype: mx.Dtype) -> str:
    """`mlx.core.bfloat16` to `bfloat16`."""
    return str(dtype).rpartition(".")[2]


def main_dtype(checkpoint: Checkpoint) -> mx.Dtype | None:
    """The floating dtype that most bytes of the plain tensors have; None where there is none."""
    sizes: Counter[mx.Dtype] = Counter()
    for name in checkpoint.names():
        stored = checkpoint.stored(name)
        if isinstance(stored, mx.Dtype) and stored in _MANTISSA:
            sizes[stored] += checkpoint.nbytes(name)
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def compute_dtype(checkpoint: Checkpoint, asked: str | mx.Dtype | None) -> mx.Dtype:
    """What is asked for, else what the device is quick in: on a GPU the stored one if it has 16 bits.

    Gemma's activations leave the range of float16, so that it is never chosen for it.
    """
    if asked is not None:
        return parse_dtype(asked)
    default = default_dtype()
    gemma = str(checkpoint.config.get("model_type", "")).startswith("gemma")
    if default == mx.bfloat16 and not gemma and main_dtype(checkpoint) == mx.float16:
        return mx.float16
    return default


def loses_precision(stored: mx.Dtype, target: mx.Dtype) -> bool:
    """Whether casting this floating dtype may round; float16 and bfloat16 lose either way (precision or range)."""
    return stored in _MANTISSA and target in _MANTISSA and stored != target and target != mx.float32
