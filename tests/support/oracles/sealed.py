"""Values of sealed pages, in NumPy."""

from __future__ import annotations

import numpy as np

from mlxinfer.kernels_metal.formats import v_group

from .sealed_pages import quantize, value_inset


def restored(x: np.ndarray, bits: int, inset: float = 0.0) -> np.ndarray:
    """Quantize and restore groups along the last axis."""
    if bits == 16:
        return x
    codes, scale, bias = quantize(x, bits, inset)
    return bias.astype(np.float32)[..., None] + scale.astype(np.float32)[..., None] * codes.astype(np.float32)


def restored_keys(pages: np.ndarray, bits: int) -> np.ndarray:
    """`[..., 64, D]`."""
    return restored(pages.swapaxes(-1, -2), bits).swapaxes(-1, -2)


def restored_values(pages: np.ndarray, bits: int) -> np.ndarray:
    group = v_group(pages.shape[-1]) if bits < 16 else 1
    return restored(pages.reshape(*pages.shape[:-1], -1, group), bits, value_inset(bits)).reshape(pages.shape)
