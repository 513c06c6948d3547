"""Products of bfloat16 rows with matrices whose scales are float16.

Scales of GGUF files are float16. bfloat16 has 8 significant bits instead of 11, and a K-quant with such scales is 50 times further from its
file (a KL divergence of 1.6e-3 instead of 3e-5 on SmolLM2 135M). MLX would compute a mixture of both in float32. Here the product is
computed in float16, with rows scaled down by a power of two, which is exact in both dtypes. Numbers up to four million then fit; numbers
below 4e-6 count as zero.
"""

from __future__ import annotations

from functools import cache
from threading import get_ident

import mlx.core as mx

from .activations import Elementwise, fused
from .weights import Quantized

_SHRINK = 2.0**-6


def is_mixed(x: mx.array, matrix: Quantized) -> bool:
    """True if this module computes the product of these rows and the matrix."""
    return x.dtype == mx.bfloat16 and matrix.scales.dtype == mx.float16


def narrowed(x: mx.array) -> mx.array:
    """Scale bfloat16 rows down, to float16."""
    return _operations(get_ident())[0](x)


def restored(y: mx.array) -> mx.array:
    """Undo the scaling of `narrowed` in a product, to bfloat16."""
    return _operations(get_ident())[1](y)


@cache
def _operations(thread: int) -> tuple[Elementwise, Elementwise]:
    """Compile once per thread: streams of MLX belong to threads, and compiled functions to streams."""
    return fused(lambda x: (x * _SHRINK).astype(mx.float16)), fused(lambda y: y.astype(mx.bfloat16) * (1 / _SHRINK))
