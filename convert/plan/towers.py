"""Plans which tensors of a vision tower are written, and in which format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...loading.checkpoint import Checkpoint
from ...loading.directory import SafetensorsCheckpoint
from ...loading.formats import packed_shapes
from ...loading.skipped import OF_AUDIO, OF_TOWERS
from ...loading.vision import prepare_vision
from ...loading.weights import TensorIndex, can_quantize
from ...nn.weights import Format
from .stored_part import StoredPart

_REASONS = (OF_TOWERS, OF_AUDIO)
_BLOCK = re.compile(r"\.(layers|layer|blocks)\.\d+\.")
"""Part of the names of a tower's blocks. Patches, positions and mergers are never quantized."""
_GROUPS = (64, 32)


@dataclass(frozen=True, slots=True)
class TowerPlan:
    """Vision and audio towers of a checkpoint."""

    names: tuple[str, ...]
    """Tensors that are written to a file of their own."""
    loads: bool
    """True if the destination is a whole model, whose tower is loaded with it."""
    formats: Mapping[str, Format]
    """Formats of the matrices that are quantized."""

    def parts(self, checkpoint: Checkpoint) -> list[tuple[str, list[StoredPart]]]:
        """Return the stored tensors, by the name of the tensor that they belong to."""
        if not isinstance(checkpoint, SafetensorsCheckpoint):
            return []
        found, tensors = [], checkpoint.tensors
        for name in self.names:
            if form := self.formats.get(name):
                found.append((name, _quantized_parts(name, checkpoint.shape(name), tensors.info(name).dtype, form)))
                continue
            infos = {part: tensors.info(part) for part in checkpoint.parts(name)}
            found.append((name, [StoredPart(part, info.dtype, tuple(info.shape), info.nbytes) for part, info in infos.items()]))
        return found

    def nbytes(self, checkpoint: Checkpoint) -> int:
        """Return the bytes of the file without its header."""
        return sum(part.nbytes for _, parts in self.parts(checkpoint) for part in parts)

    def quantization(self, checkpoint: Checkpoint) -> dict[str, Format]:
        """Return the formats of quantized matrices, here or in the source, by their paths."""
        stored = {name: checkpoint.stored(name) for name in self.names}
        found = {name: form for name, form in stored.items() if isinstance(form, Format)} | dict(self.formats)
        return {name.removesuffix(".weight"): form for name, form in found.items()}


def plan_towers(checkpoint: Checkpoint, text: TensorIndex, towers: str) -> TowerPlan:
    """Plan towers from headers. `text` is the finished index of the text model; `towers` is `ConvertArgs.towers`."""
    names = tuple(name for name, reason in text.skipped.items() if reason in _REASONS)
    if towers == "none" or not isinstance(checkpoint, SafetensorsCheckpoint):
        return TowerPlan((), False, {})
    if any(len(checkpoint.parts(name)) > 1 and not isinstance(checkpoint.stored(name), Format) for name in names):
        return TowerPlan(names, False, {})  # packed by another tool
    vision = None if checkpoint.is_foreign else prepare_vision(checkpoint, text, mx.float32)
    if vision is None or isinstance(vision, str):
        return TowerPlan(names, False, {})
    wanted = [name for name in vision.matrices if _BLOCK.search(name)] if towers == "8" else []
    formats = {name: form for name in wanted if (form := _format(checkpoint, name)) is not None}
    return TowerPlan(names, True, formats)


def _format(checkpoint: Checkpoint, name: str) -> Format | None:
    if isinstance(checkpoint.stored(name), Format):
        return None
    forms = (Format(8, size) for size in _GROUPS)
    return next((form for form in forms if can_quantize(checkpoint.shape(name), form)), None)


def _quantized_parts(name: str, shape: tuple[int, ...], dtype: str, form: Format) -> list[StoredPart]:
    packed, groups = packed_shapes(shape, form)
    base, size = name.removesuffix("weight"), 4 if dtype == "F32" else 2
    scales = [StoredPart(base + part, dtype, groups, math.prod(groups) * size) for part in ("scales", "biases")]
    return [StoredPart(name, "U32", packed, math.prod(packed) * 4), *scales]


def paths_in_mlx(path: str) -> set[str]:
    """Return the names that mlx-vlm and mlx-lm may give to a module of this path."""
    text = re.sub(r"^(model\.)?(language_model|text_model)\.(model\.)?|^model\.", "", path)
    tower = re.sub(r"^(model\.)?visual\.", "vision_tower.", path).removeprefix("model.")
    short = tower.replace("vision_tower.vision_model.", "vision_tower.")
    long = short.replace("vision_tower.", "vision_tower.vision_model.")
    return {f"language_model.model.{text}", f"language_model.{text}", tower, short, long} - {path}


def whole_config(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a whole model whose text config is `text`."""
    place = "llm_config" if isinstance(config.get("llm_config"), Mapping) else "text_config"
    if not isinstance(config.get(place), Mapping):  # a flat config
        return {**config, **{key: value for key, value in text.items() if key != "model_type"}}
    kept = {key: value for key, value in text.items() if key != "model_type"}
    return {**config, place: {**kept, "model_type": config[place].get("model_type", text["model_type"])}}
