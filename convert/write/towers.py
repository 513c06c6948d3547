"""Vision and audio towers of a destination, in a file of their own.

They keep the source's names. A whole model has them in its index. Otherwise they are kept with the source's config in the metadata, and
loaders ignore the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...loading.checkpoint import Checkpoint
from ...loading.directory import SafetensorsCheckpoint
from ...loading.load import prepare
from ...loading.quantized import StoredTensors
from ...loading.weights import quantize
from ...nn.weights import Dense
from ...vision.picture import read_picture
from ..plan.stored_part import StoredPart
from ..plan.weight_map import ConversionPlan
from .journal import Journal, Span, digest_of
from .writer import bytes_of

FILE = "towers.safetensors"
_KEPT = f"kept in {FILE}"
_UNIT = "towers"
_CHUNK = 1 << 24
"""Bytes copied at once."""


def tower_parts(checkpoint: Checkpoint, plan: ConversionPlan) -> list[StoredPart]:
    """Return the stored tensors of the towers that belong to the destination's index."""
    return [part for _, parts in plan.towers.parts(checkpoint) for part in parts] if plan.towers.loads else []


def write_towers(checkpoint: Checkpoint, plan: ConversionPlan, directory: Path, journal: Journal) -> dict[str, str]:
    """Write the towers, and return `plan.skipped` with changed reasons. Raises OSError, `CheckpointError`."""
    parts = plan.towers.parts(checkpoint)
    if not parts:
        return plan.skipped
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    path = directory / FILE
    if journal.done(_UNIT) is None:
        _write(checkpoint, plan, parts, path)
        size = path.stat().st_size
        journal.record(_UNIT, {}, [Span(f"{directory.name}/{FILE}", 0, size, digest_of(path, 0, size))])
    return {name: _KEPT if name in plan.towers.names else reason for name, reason in plan.skipped.items()}


def _write(checkpoint: SafetensorsCheckpoint, plan: ConversionPlan, parts: list[tuple[str, list[StoredPart]]], path: Path) -> None:
    metadata = {"format": "mlx"} if plan.whole else {"format": "pt", "config": json.dumps(checkpoint.config, sort_keys=True)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for part in (part for _, stored in parts for part in stored):
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [end, end + part.nbytes]}
        end += part.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, stored in parts:
            for data in _data(checkpoint, plan, name, stored):
                file.write(data)


def _data(checkpoint: SafetensorsCheckpoint, plan: ConversionPlan, name: str, parts: list[StoredPart]) -> Iterator[Any]:
    form = plan.towers.formats.get(name)
    if form is None:
        for part in parts:
            yield from _copied(checkpoint.tensors, part.name)
        return
    matrix = checkpoint.read(name)
    assert isinstance(matrix, Dense)
    packed = quantize(matrix.weight, form)
    assert packed.biases is not None
    yield from (bytes_of(array) for array in (packed.weight, packed.scales, packed.biases))


def _copied(tensors: StoredTensors, name: str) -> Iterator[bytes]:
    shape = tensors.info(name).shape or (1,)
    step = max(1, _CHUNK // max(4 * math.prod(shape[1:]), 1))
    for first in range(0, shape[0], step):
        yield tensors.codes(name, first, min(first + step, shape[0])).tobytes()


def feature_error(source: Path, written: Path) -> float:
    """Return the difference of the features of one picture, relative to the source's: the ratio of their 2-norms."""
    before, after = (_features(path) for path in (source, written))
    return float(mx.linalg.norm(after - before).item()) / float(mx.linalg.norm(before).item())  # type: ignore[arg-type]


def _features(directory: Path) -> mx.array:
    with prepare(directory, vision="on") as found:
        assert not isinstance(found.vision, str)
        vision = found.vision.read()
    pixels = vision.processor.pixels(read_picture(_picture()))
    found_rows = vision.tower.features(mx.array(pixels.normalized()), pixels.layout.pieces).features.astype(mx.float32)
    mx.eval(found_rows)
    return found_rows


def _picture() -> np.ndarray[Any, Any]:
    """Return a picture with edges, gradients and noise: uint8 [384, 512, 3]."""
    rows, columns = np.mgrid[0:384, 0:512]
    waves = [127 + 100 * np.sin(rows / 23), 255 * columns / 511, 255.0 * ((rows // 48 + columns // 48) % 2)]
    noise = np.random.default_rng(0).normal(0, 12, (384, 512, 3))
    found: np.ndarray[Any, Any] = np.clip(np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8)
    return found
