"""Seals full pages on the GPU; `mlxinfer/cache/kv_quantization.py` does the same in plain MLX."""

from __future__ import annotations

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ..executors import get_kernel
from ..formats import BITS, v_group

PAGE = 64
_FILE = "seal_page/seal_page.metal"


def seal_keys(pages: mx.array, bits: int) -> list[mx.array]:
    """Quantize `[Hkv, n, 64, D]` to codes uint32 `[Hkv, n, D, 2 * bits]` and scales float16 `[Hkv, n, 2, D]`; at 16 bits, transpose to
    `[Hkv, n, D, 64]`. Raises ValueError and `UnsupportedShapeError`."""
    heads, number, dim = _check(pages, bits)
    if bits == 16:
        return [pages.swapaxes(-1, -2)]
    return get_kernel(_FILE, "seal_keys")(
        inputs=[pages],
        template=[("T", pages.dtype), ("BITS", bits), ("DIM", dim)],
        output_shapes=[(heads, number, dim, 2 * bits), (heads, number, 2, dim)],
        output_dtypes=[mx.uint32, mx.float16],
        grid=(-(-dim // 32) * 32, number, heads),
        threadgroup=(32, 1, 1),
    )


def seal_values(pages: mx.array, bits: int) -> list[mx.array]:
    """Quantize `[Hkv, n, 64, D]` to codes uint32 `[Hkv, n, 64, words]` and scales float16 `[Hkv, n, 2, 64, D / group]`; at 16 bits, return
    the pages. Raises ValueError and `UnsupportedShapeError`."""
    heads, number, dim = _check(pages, bits)
    if bits == 16:
        return [pages]
    group = v_group(dim)
    return get_kernel(_FILE, "seal_values")(
        inputs=[pages],
        template=[("T", pages.dtype), ("BITS", bits), ("DIM", dim), ("GROUP", group)],
        output_shapes=[(heads, number, PAGE, -(-dim * bits // 32)), (heads, number, 2, PAGE, dim // group)],
        output_dtypes=[mx.uint32, mx.float16],
        grid=(PAGE, number, heads),
        threadgroup=(32, 1, 1),
    )


def _check(pages: mx.array, bits: int) -> tuple[int, int, int]:
    if pages.ndim != 4 or pages.shape[2] != PAGE or 0 in pages.shape:
        raise ValueError(f"pages to seal are {list(pages.shape)}; expected [KV heads, pages, {PAGE}, head size]")
    heads, number, _, dim = pages.shape
    if bits not in BITS or (bits != 16 and dim % 8):
        raise UnsupportedShapeError(f"no pages of {bits} bits and heads of {dim}; there are {BITS}, and heads of a multiple of 8")
    if pages.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise UnsupportedShapeError(f"no sealing of {pages.dtype}; there are float32, float16 and bfloat16")
    return heads, number, dim
