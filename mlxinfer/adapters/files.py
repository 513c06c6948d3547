"""Opens an adapter: which format it has, what it holds, and what names its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from ..loading.files import add_bytes, read_json
from ..loading.gguf.reader import GGUFFile
from ..loading.safetensors import SafetensorsFile
from ..models.vlm_text import TEXT_MODELS, text_config
from .gguf import gguf_updates
from .mlx_lm import WEIGHTS as MLX_LM_WEIGHTS
from .mlx_lm import mlx_lm_updates
from .peft import WEIGHTS as PEFT_WEIGHTS
from .peft import peft_updates
from .update import CONFIG, Adapter, Update


def open_adapter(name: str, path: str | Path, config: Mapping[str, Any]) -> Adapter:
    """An adapter for the model with this config: a directory as PEFT or mlx-lm writes it, or a GGUF file. Its headers are read, its
    numbers are not. Raises `AdapterError`, and `CheckpointError` for files that are cut or corrupt."""
    place = Path(path).expanduser()
    if place.is_dir():
        return _of_directory(name, place, _text_part(config))
    if place.suffix == ".gguf" and place.is_file():
        return _of_gguf(name, place, _text_part(config))
    if not place.exists():
        raise AdapterError(f"there is no adapter at {place}: give the folder that adapter_config.json is in, or a GGUF file")
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
