"""Checkpoints that other tools have quantized: GPTQ, AWQ, compressed-tensors, modelopt, bitsandbytes, 8-bit floats.

Each method has a file that knows its layout, and finds its matrices among the stored tensors. What MLX has a format for is kept as it is,
the rest is unpacked to plain numbers when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import UnsupportedModelError
from . import awq, bitsandbytes, compressed, fp8, gptq
from .stored import Block, Found, PackedMatrix, StoredTensors

__all__ = ["METHODS", "PackedMatrix", "StoredTensors", "check_method", "find_packed"]

METHODS: dict[str, Callable[[Block, StoredTensors], Found]] = {
    "awq": awq.find,
    "bitsandbytes": bitsandbytes.find,
    "compressed-tensors": compressed.find,
    "fbgemm_fp8": fp8.find,
    "fp8": fp8.find,
    "gptq": gptq.find,
    "modelopt": compressed.find_modelopt,
}
"""By `quant_method`: what finds the matrices. MXFP4 of gpt-oss is not here, as its graph knows the layout."""


def find_packed(method: str, block: Block, tensors: StoredTensors) -> Found:
    """The quantized matrices, by the names of the unpacked ones. Raises `UnsupportedModelError` for layouts that are not known, and where
    no matrix is found, `CheckpointError` for tensors that do not fit together."""
    found = METHODS[method](block, tensors)
    if not found:
        raise UnsupportedModelError(f"{tensors.path}: its config names the quantization {method}, but no tensor is in a layout of it")
    return found


def check_method(method: str, path: Path) -> None:
    """Raise `UnsupportedModelError` for a method that is not known."""
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{path} is quantized with {method}, which is not supported, only {', '.join(METHODS)} and mxfp4 of gpt-oss: use the "
            "original, a GGUF or an MLX version of the model"
        )
