"""Summary of a checkpoint's headers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Literal

import mlx.core as mx

from ..nn.weights import Format
from ..util.dataclass import dataclass
from .checkpoint import Checkpoint
from .formats import dtype_name
from .gguf import GGUFCheckpoint

_PLAIN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Summary:
    """A model as its files describe it."""

    name: str
    """Name that the caller gave, or the file's."""
    path: Path
    """The file or directory."""
    file_format: Literal["gguf", "safetensors"]
    """MLX directories count as safetensors."""
    architecture: str
    """`model_type` of the config."""
    parameters: int
    """Count of numbers in all tensors."""
    nbytes: int
    """Bytes of all tensors in the file, with scales."""
    stored: dict[str, int]
    """Count of tensors by `Checkpoint.kind`, the most common first."""
    most: str
    """Short name of the type of most parameters."""
    file_type: int | None
    """GGUF's `general.file_type`, the number of the mixture of types, or None."""
    max_context: int | None
    """Tokens; None if this package has no graph of the architecture."""

    notes: tuple[str, ...] = ()
    """Messages for the user."""
    tower_bytes: int = 0
    """Bytes of the vision tower in memory, in 16 bits; 0 for a model that cannot see images."""
    blind: str = ""
    """The reason why the model cannot see images, if it is known."""

    @property
    def bits_per_weight(self) -> float:
        """Bits in the file per parameter."""
        return self.nbytes * 8 / self.parameters if self.parameters else 0.0

    @property
    def quantization(self) -> str:
        """llama.cpp's name, such as "Q4_K_M"; `most` if the file does not say."""
        if self.file_type is None:
            return self.most
        from gguf import LlamaFileType  # slower to import than the rest of the summary

        try:
            return LlamaFileType(self.file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except ValueError:
            return self.most


def summarize(checkpoint: Checkpoint, name: str, architecture: str, max_context: int | None, quantize: Format | None = None) -> Summary:
    """Summarize a checkpoint. `quantize` is the format that plain matrices get on loading."""
    names = list(checkpoint.names())
    parameters: Counter[str] = Counter()
    first: dict[str, str] = {}
    for tensor in names:
        kind = checkpoint.kind(tensor)
        parameters[kind] += math.prod(checkpoint.shape(tensor))
        first.setdefault(kind, tensor)
    most = parameters.most_common(1)[0][0] if parameters else "F32"
    stored = checkpoint.stored(first[most]) if parameters else mx.float32
    quantized = quantize if quantize and not isinstance(stored, Format) else None
    return Summary(
        name=name,
        path=checkpoint.path,
        file_format="gguf" if isinstance(checkpoint, GGUFCheckpoint) else "safetensors",
        architecture=architecture,
        parameters=sum(parameters.values()),
        nbytes=sum(map(checkpoint.nbytes, names)),
        stored=dict(Counter(map(checkpoint.kind, names)).most_common()),
        most=_short_type(quantized or stored) if quantized or not isinstance(checkpoint, GGUFCheckpoint) else most,
        file_type=None if quantized else _file_type(checkpoint),
        max_context=max_context,
    )


def _short_type(stored: Format | mx.Dtype) -> str:
    if not isinstance(stored, Format):
        return _PLAIN.get(dtype_name(stored), dtype_name(stored))
    return f"Q{stored.bits}" if stored.mode == "affine" else stored.mode.upper()


def _file_type(checkpoint: Checkpoint) -> int | None:
    number = checkpoint.metadata.get("general.file_type") if isinstance(checkpoint, GGUFCheckpoint) else None
    try:
        return None if number is None else int(number)
    except ValueError:
        return None
