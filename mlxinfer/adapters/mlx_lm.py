"""Adapters as mlx-lm writes them: adapter_config.json and adapters.safetensors.

Source: `tuner/utils.py`, `tuner/lora.py` and `tuner/dora.py` of https://github.com/ml-explore/mlx-lm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..loading.safetensors import SafetensorsFile
from ..util.name_pattern import is_ending
from ..util.typed_reader import shown
from .peft import ConfigReader
from .update import CONFIG, Update, updates_in

WEIGHTS = "adapters.safetensors"
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_LAYER = re.compile(r"layers\.(\d+)\.")


def mlx_lm_updates(path: Path, config: Mapping[str, Any], file: SafetensorsFile, layers: int) -> Iterator[Update]:
    """The updates of an adapter for a model of so many layers. Raises `AdapterError` for whatever would not be applied."""
    return updates_in(path, file, _Settings(path / CONFIG, config, layers))


class _Settings:
    """Implements `Settings`."""

    tensor = _TENSOR
    parts = "lora_a", "lora_b", "m"
    transposed = True

    def __init__(self, path: Path, config: Mapping[str, Any], layers: int) -> None:
        reader = ConfigReader(path, config)
        kind = reader.text("fine_tune_type", "lora")
        if kind not in ("lora", "dora"):
            raise reader.error("fine_tune_type", f"is {shown(kind)}: only lora and dora are adapters")
        self.dora = kind == "dora"
        inner = reader.take("lora_parameters")
        if not isinstance(inner, dict):
            raise reader.bad("lora_parameters", inner, "an object")
        parameters = ConfigReader(path, inner)
        self._rank, self._scale = parameters.integer("rank"), parameters.number("scale")
        self._keys = parameters.take("keys")
        count = reader.optional_integer("num_layers", reader.take("lora_layers"), low=-1)
        self._first = 0 if count is None or count <= 0 else max(layers - count, 0)

    def rank(self, module: str) -> int:
        return self._rank

    def scale(self, module: str) -> float:
        return self._scale

    def left_out(self, module: str) -> str:
        layer = _LAYER.search(module)
        if layer is not None and int(layer[1]) < self._first:
            return f"is for layer {layer[1]}, and {CONFIG} says that layers from {self._first} on are adapted"
        return "" if is_ending(module, self._keys) else f"is for a module that is not among the keys of {CONFIG}"
