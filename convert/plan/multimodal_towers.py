"""Vision and audio towers: what sees and hears is kept next to the text model, byte for byte, and never quantized.

They stand in `towers.safetensors`, under the names and in the dtypes of the source, whose whole config is in the file's metadata. Nothing
that loads the text model reads it: programs look for `model*.safetensors`, or for what the index lists.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ...loading.checkpoint import Checkpoint
from ...loading.directory import SafetensorsCheckpoint
from ...loading.quantized import StoredTensors
from ...loading.skipped import OF_TOWERS
from ..write.journal import Journal, Span, digest_of

FILE = "towers.safetensors"
_KEPT = f"kept as it is in {FILE}: {OF_TOWERS}"
_UNIT = "towers"
_CHUNK = 1 << 24
"""Bytes copied at once."""


def tower_parts(checkpoint: Checkpoint, skipped: dict[str, str]) -> list[str]:
    """The stored tensors that make up towers; `skipped` says why tensors are not part of the text model, as `MetaWeights.skipped`."""
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        return []
    return [part for name, reason in skipped.items() if reason == OF_TOWERS for part in checkpoint.parts(name)]


def tower_bytes(checkpoint: Checkpoint, skipped: dict[str, str]) -> int:
    """Bytes of the file that `write_towers` writes, its header left out."""
    return sum(checkpoint.nbytes(name) for name, reason in skipped.items() if reason == OF_TOWERS)


def write_towers(checkpoint: Checkpoint, skipped: dict[str, str], directory: Path, journal: Journal) -> dict[str, str]:
    """Copy them; returns `skipped` with the reasons changed. Raises OSError."""
    parts = tower_parts(checkpoint, skipped)
    if not parts:
        return skipped
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    path = directory / FILE
    if journal.done(_UNIT) is None:
        _copy(checkpoint.tensors, parts, path, checkpoint.config)
        size = path.stat().st_size
        journal.record(_UNIT, {}, [Span(f"{directory.name}/{FILE}", 0, size, digest_of(path, 0, size))])
    return {name: _KEPT if reason == OF_TOWERS else reason for name, reason in skipped.items()}


def _copy(tensors: StoredTensors, names: list[str], path: Path, config: dict[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "config": json.dumps(config, sort_keys=True)}}
    end = 0
    for name in names:
        info = tensors.info(name)
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [end, end + info.nbytes]}
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            shape = tensors.info(name).shape or (1,)
            step = max(1, _CHUNK // max(4 * math.prod(shape[1:]), 1))
            for first in range(0, shape[0], step):
                file.write(tensors.codes(name, first, min(first + step, shape[0])).tobytes())
