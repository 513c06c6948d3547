"""Opens adapters in the formats of PEFT, mlx-lm and GGUF."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from ..loading.files import add_bytes, read_json
from ..loading.gguf.reader import GGUFFile
from ..loading.safetensors import SafetensorsFile
from ..models.vlm_text import TEXT_MODELS, text_config
from ..util.name_pattern import is_ending
from ..util.typed_reader import shown
from .gguf import gguf_updates
from .peft import WEIGHTS as PEFT_WEIGHTS
from .peft import PEFTConfigReader, peft_updates
from .update import CONFIG, Adapter, Update, updates_in


def open_adapter(name: str, path: str | Path, config: Mapping[str, Any]) -> Adapter:
    """Open an adapter for the model of `config`: a directory of PEFT or mlx-lm, or a GGUF file. Reads headers only.

    Raises `AdapterError`, and `CheckpointError` for truncated or corrupt files.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return _of_directory(name, place, _text_part(config))
    if place.suffix == ".gguf" and place.is_file():
        return _of_gguf(name, place, _text_part(config))
    if not place.exists():
        raise AdapterError(f"no adapter at {place}: give the folder that adapter_config.json is in, or a GGUF file")
    raise AdapterError(f"{place} is no adapter: give the folder that adapter_config.json is in, or a GGUF file")


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    return text_config(config) if config.get("model_type") in TEXT_MODELS else dict(config)


def _of_directory(name: str, path: Path, model: Mapping[str, Any]) -> Adapter:
    weights = next((path / file for file in (PEFT_WEIGHTS, MLX_LM_WEIGHTS) if (path / file).is_file()), None)
    if weights is None:
        pickled = next(iter(sorted(path.glob("adapter_model.*"))), None)
        hint = f" ({pickled.name} is not read: it can run code; save it as safetensors)" if pickled else ""
        raise AdapterError(f"{path} has neither {PEFT_WEIGHTS} nor {MLX_LM_WEIGHTS}{hint}")
    if not (path / CONFIG).is_file():
        raise AdapterError(f"{path} has no {CONFIG}, which says how strong the adapter is")
    config, file = read_json(path / CONFIG), SafetensorsFile(weights)
    try:
        if weights.name == PEFT_WEIGHTS:
            kind, found = "PEFT", peft_updates(path, config, file)
        else:
            kind, found = "mlx-lm", mlx_lm_updates(path, config, file, model.get("num_hidden_layers", 0))
        return Adapter(name, path, kind, _digest(weights, config), _by_key(path, found), file.close)
    except BaseException:
        file.close()
        raise


def _of_gguf(name: str, path: Path, model: Mapping[str, Any]) -> Adapter:
    file = GGUFFile(path)
    try:
        if file.metadata.get("general.type") != "adapter":
            raise AdapterError(f"{path} holds a model, no adapter: its general.type is {file.metadata.get('general.type', 'model')!r}")
        return Adapter(name, path, "GGUF", _digest(path, {}), _by_key(path, gguf_updates(path, file, model)), file.close)
    except BaseException:
        file.close()
        raise


def _by_key(path: Path, found: Iterable[Update]) -> dict[str, Update]:
    updates: dict[str, Update] = {}
    for update in found:
        if update.key in updates:
            raise AdapterError(f"{path}: {update.tensor!r} and {updates[update.key].tensor!r} are for the same projection")
        updates[update.key] = update
    if not updates:
        raise AdapterError(f"{path}: the adapter has no tensors")
    return updates


def _digest(weights: Path, config: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode() + b"\0")
    add_bytes(digest, weights)
    return digest.hexdigest()


MLX_LM_WEIGHTS = "adapters.safetensors"
_TENSOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_LAYER = re.compile(r"layers\.(\d+)\.")


def mlx_lm_updates(path: Path, config: Mapping[str, Any], file: SafetensorsFile, layers: int) -> Iterator[Update]:
    """Yield the updates of an adapter for a model of `layers` layers. Raises `AdapterError` for tensors that cannot be applied."""
    return updates_in(path, file, _MLXLMFormat(path / CONFIG, config, layers))


class _MLXLMFormat:
    """Implements `AdapterFormat`."""

    tensor = _TENSOR
    parts = "lora_a", "lora_b", "m"
    transposed = True

    def __init__(self, path: Path, config: Mapping[str, Any], layers: int) -> None:
        reader = PEFTConfigReader(path, config)
        kind = reader.text("fine_tune_type", "lora")
        if kind not in ("lora", "dora"):
            raise reader.error("fine_tune_type", f"is {shown(kind)}: only lora and dora are adapters")
        self.dora = kind == "dora"
        inner = reader.take("lora_parameters")
        if not isinstance(inner, dict):
            raise reader.bad("lora_parameters", inner, "an object")
        parameters = PEFTConfigReader(path, inner)
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
