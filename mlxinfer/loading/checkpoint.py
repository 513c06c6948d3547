"""What every kind of checkpoint offers: a config, and tensors that are read one at a time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ..nn.weights import Format, Matrix


class Checkpoint(Protocol):
    """A model on disk. Opening one reads headers only; a file that is cut or inconsistent raises `CheckpointError` then."""

    path: Path
    config: dict[str, Any]
    """A Hugging Face config, of either style; for GGUF rebuilt from the metadata."""

    def names(self) -> Collection[str]:
        """Names of the logical tensors. A quantized matrix is one tensor, named after its `.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape: that of the unpacked matrix where it is quantized."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes in the file, scales included."""
        ...

    def stored(self, name: str) -> Format | mx.Dtype:
        """What `read` will give, known without reading: the format of a `Quantized` or of `RawBlocks`, or the dtype of a `Dense`."""
        ...

    def kind(self, name: str) -> str:
        """The type in the file by its own name: "Q4_K" or "BF16" in GGUF, "bfloat16", "4-bit affine in groups of 64" or
        "GPTQ, 4 bits in groups of 128" in safetensors."""
        ...

    def unpacked_from(self, name: str) -> str | None:
        """As `kind`, for a quantized type that no format of MLX holds, so that `read` unpacks it; None for all else."""
        ...

    def read(self, name: str) -> Matrix:
        """Read one tensor, as it is stored: `Quantized` where MLX has the same format, else `Dense` in its stored (or, for
        GGUF's other types, dequantized float32) precision. The result is evaluated and shares no memory with the file, except for
        `RawBlocks`, which only a checkpoint opened for those gives."""
        ...

    def close(self) -> None: ...
