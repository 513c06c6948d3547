"""The interface of every kind of checkpoint: a config, and tensors that are read one at a time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ..nn.weights import Format, Matrix


class Checkpoint(Protocol):
    """A model on disk. Opening it reads headers only, and raises `CheckpointError` for a truncated or inconsistent file."""

    path: Path
    config: dict[str, Any]
    """A Hugging Face config, of either style; for GGUF rebuilt from the metadata."""

    def names(self) -> Collection[str]:
        """Names of the logical tensors. A quantized matrix is one tensor, named after its `.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape: for a quantized matrix that of the unpacked one."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes in the file, with scales."""
        ...

    def stored(self, name: str) -> Format | mx.Dtype:
        """The format or dtype that `read` will return, known without reading: the format of `Quantized` or `RawBlocks`, the dtype of
        `Dense`."""
        ...

    def kind(self, name: str) -> str:
        """The file's own name of the type: "Q4_K" or "BF16" in GGUF; "bfloat16", "4-bit affine in groups of 64" or "GPTQ, 4 bits in
        groups of 128" in safetensors."""
        ...

    def unpacked_from(self, name: str) -> str | None:
        """The `kind` of a quantized tensor that `read` unpacks, because MLX has no format for it; None for any other."""
        ...

    def read(self, name: str) -> Matrix:
        """Read a tensor as stored: `Quantized` if MLX has the format, else `Dense` in its stored precision.

        Other GGUF types become float32. The result is evaluated and shares no memory with the file, except `RawBlocks`, which only a
        checkpoint opened for them returns.
        """
        ...

    def close(self) -> None: ...
