"""Adapters as mlx-lm writes them: adapter_config.json and adapters.safetensors.

Source: `tuner/utils.py`, `tuner/lora.py` and `tuner/dora.py` of https://github.com/ml-explore/mlx-lm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from ..loading.safetensors import SafetensorsFile
from ..typed_reader import shown
from .pattern import is_target
from .peft import CONFIG, ConfigReader
from .update import Factors, Update, check_factors, finite_factors, key_of, not_applied

WEIGHTS = "adapters.safetensors"
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_LAYER = re.compile(r"layers\.(\d+)\.")


def mlx_lm_updates(path: Path, config: Mapping[str, Any], file: SafetensorsFile, layers: int) -> Iterator[Update]:
    """The updates of an adapter for a model of so many layers. Raises `AdapterError` for whatever would not be applied."""
    settings = _Settings(path / CONFIG, config, layers)
    parts: dict[str, dict[str, str]] = {}
    for tensor in file.tensors:
        found = _TENSOR.fullmatch(tensor)
        if found is None or (found["part"] == "m" and not settings.dora):
            raise not_applied(path, tensor)
        why = settings.left_out(found["module"])
        if why:
            raise not_applied(path, tensor, why)
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    for module, tensors in parts.items():
        yield _update(path, module, tensors, settings, file)


def _update(path: Path, module: str, tensors: Mapping[str, str], settings: _Settings, file: SafetensorsFile) -> Update:
    wanted = ["lora_a", "lora_b", *(["m"] if settings.dora else [])]
    missing = [part for part in wanted if part not in tensors]
    if missing:
        raise AdapterError(f"{path}: {module!r} has no {missing[0]}; save or download the adapter again")
    a, b, *rest = (tensors[part] for part in wanted)
    magnitude = rest[0] if rest else None
    of_a, of_b = (file.tensors[tensor].shape[::-1] for tensor in (a, b))
    check_factors(path, module, of_a, of_b, file.tensors[magnitude].shape if magnitude else None)
    rank = of_a[0]
    if rank != settings.rank:
        raise AdapterError(f"{path}: the tensor {a!r} has rank {rank}, and {CONFIG} says {settings.rank}")

    def read() -> Factors:
        return finite_factors(path, a, file.read(a).T, file.read(b).T, file.read(magnitude) if magnitude else None)

    return Update(key_of(module), a, rank, (of_b[0], of_a[1]), settings.scale, settings.dora, read)


class _Settings:
    """What adapter_config.json says."""

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
        self.rank, self.scale = parameters.integer("rank"), parameters.number("scale")
        self._keys = parameters.take("keys")
        count = reader.optional_integer("num_layers", reader.take("lora_layers"), low=-1)
        self._first = 0 if count is None or count <= 0 else max(layers - count, 0)

    def left_out(self, module: str) -> str:
        """Why mlx-lm would not apply an update of this module; empty if it would."""
        layer = _LAYER.search(module)
        if layer is not None and int(layer[1]) < self._first:
            return f"is for layer {layer[1]}, and {CONFIG} says that layers from {self._first} on are adapted"
        return "" if is_target(module, self._keys) else f"is for a module that is not among the keys of {CONFIG}"
