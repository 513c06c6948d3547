"""Blocks of any GGUF type to float32: by the `gguf` package, and here for the types that it can size but not decode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import UnsupportedModelError
from .types import TensorType


def dequantize(kind: TensorType, blocks: np.ndarray) -> np.ndarray:
    """uint8 `[n, block_bytes]` to float32 `[n, block]`. Raises `UnsupportedModelError` for a type that nobody here can decode."""
    decode = _OWN.get(kind.name) or _of_gguf(kind)
    with np.errstate(over="ignore", invalid="ignore"):
        return decode(blocks)


def _of_gguf(kind: TensorType) -> Callable[[np.ndarray], np.ndarray]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    def decode(blocks: np.ndarray) -> np.ndarray:
        row = blocks.reshape(1, -1)  # the package goes through 16 rows at a time: one long row saves most of its time
        try:
            return np.asarray(gguf_dequantize(row, GGMLQuantizationType(kind.id)), np.float32).reshape(len(blocks), -1)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"GGUF tensors of type {kind.name} cannot be decoded; use another quantization of the model"
            ) from None

    return decode


def _halves(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _singles(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :4]).view("<f4").astype(np.float32)


def _codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes packed from the low bits of each byte up, as float32."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(len(packed), -1).astype(np.float32)


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_halves(blocks) * (2 * _codes(blocks[:, 2:], 1) - 1))


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_halves(blocks) * (_codes(blocks[:, 2:], 2) - 1))


def _q8_1(blocks: np.ndarray) -> np.ndarray:
    """A scale, a sum that only ggml's dot products use, 32 codes; the first two were float32 once and are float16 now."""
    wide = blocks.shape[1] == 40
    scales = _singles(blocks) if wide else _halves(blocks)
    return np.asarray(scales * np.ascontiguousarray(blocks[:, -32:]).view(np.int8).astype(np.float32))


def _q8_k(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_singles(blocks) * np.ascontiguousarray(blocks[:, 4:260]).view(np.int8).astype(np.float32))


_OWN: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q1_0": _q1_0, "Q2_0": _q2_0, "Q8_1": _q8_1, "Q8_K": _q8_k}
