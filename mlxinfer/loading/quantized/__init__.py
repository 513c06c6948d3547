"""Checkpoints quantized by other tools: GPTQ, AWQ, compressed-tensors, modelopt, bitsandbytes, 8-bit floats.

Each method has a file that knows its layout and finds its matrices among the stored tensors. Codes that a format of MLX can hold stay as
they are; other matrices are unpacked when they are read.
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
"""Finder of a method's matrices, by `quant_method`. MXFP4 of gpt-oss is missing because its graph knows the layout."""


def find_packed(method: str, block: Block, tensors: StoredTensors) -> Found:
    """Return the quantized matrices by the names of the unpacked ones.

    Raises `UnsupportedModelError` for unknown layouts, and `CheckpointError` if there are no matrices or their tensors do not fit
    together.
    """
    found = METHODS[method](block, tensors)
    if not found:
        raise UnsupportedModelError(f"{tensors.path}: its config names the quantization {method}, but no tensor is in a layout of it")
    return found


def check_method(method: str, path: Path) -> None:
    """Raise `UnsupportedModelError` for an unknown method."""
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{path} is quantized with {method}, which is not supported, only {', '.join(METHODS)} and mxfp4 of gpt-oss: use the "
            "original, a GGUF or an MLX version of the model"
        )
