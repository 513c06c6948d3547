"""What the headers of a checkpoint tell of a model."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from ..nn.weights import Format
from .checkpoint import Checkpoint
from .formats import dtype_name
from .gguf import GGUFCheckpoint

_PLAIN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Summary:
    """`stored` counts tensors by how they are stored, and `most` is the short name of how most of the parameters are. `file_type` is what
    the writer of a GGUF file calls its mixture of types, by its number there."""

    name: str
    path: Path
    file_format: Literal["gguf", "safetensors"]
    architecture: str
    parameters: int
    nbytes: int
    stored: dict[str, int]
    most: str
    file_type: int | None
    max_context: int | None
    """None where this program has no graph of the architecture."""

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.parameters if self.parameters else 0.0

    @property
    def quantization(self) -> str:
        if self.file_type is None:
            return self.most
        from gguf import LlamaFileType  # takes longer than all of the summary

        try:
            return LlamaFileType(self.file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except ValueError:
            return self.most


def summarize(checkpoint: Checkpoint, name: str, architecture: str, max_context: int | None, quantize: Format | None = None) -> Summary:
    """`quantize`: what matrices that are stored plain become when they are loaded."""
    names = list(checkpoint.names())
    stored = {tensor: checkpoint.stored(tensor) for tensor in names}
    parameters: Counter[Format | mx.Dtype] = Counter()
    for tensor in names:
        parameters[stored[tensor]] += math.prod(checkpoint.shape(tensor))
    most = parameters.most_common(1)[0][0] if parameters else mx.float32
    quantized = quantize if quantize and not isinstance(most, Format) else None
    return Summary(
        name=name,
        path=checkpoint.path,
        file_format="gguf" if isinstance(checkpoint, GGUFCheckpoint) else "safetensors",
        architecture=architecture,
        parameters=sum(parameters.values()),
        nbytes=sum(map(checkpoint.nbytes, names)),
        stored=dict(Counter(map(_form, stored.values())).most_common()),
        most=_short(quantized or most),
        file_type=None if quantized else _file_type(checkpoint),
        max_context=max_context,
    )


def _form(stored: Format | mx.Dtype) -> str:
    if not isinstance(stored, Format):
        return dtype_name(stored)
    return f"{stored.bits}-bit {stored.mode}, groups of {stored.group_size}"


def _short(stored: Format | mx.Dtype) -> str:
    if not isinstance(stored, Format):
        return _PLAIN.get(dtype_name(stored), dtype_name(stored))
    return f"Q{stored.bits}" if stored.mode == "affine" else stored.mode.upper()


def _file_type(checkpoint: Checkpoint) -> int | None:
    number = checkpoint.metadata.get("general.file_type") if isinstance(checkpoint, GGUFCheckpoint) else None
    try:
        return None if number is None else int(number)
    except ValueError:
        return None
