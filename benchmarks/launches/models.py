"""Models without weights, whose launches are counted."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mlxinfer.errors import MLXInferError
from mlxinfer.loading.find.resolve import resolve
from mlxinfer.loading.load import open_checkpoint
from mlxinfer.nn.weights import Format

from ..common.system import ROOT

_PUBLISHED = ROOT / "tests" / "support" / "models" / "published_configs.py"


def published() -> dict[str, dict[str, Any]]:
    """Published configs of well-known models, by name; empty outside a clone of the repository."""
    spec = importlib.util.spec_from_file_location("published_configs", _PUBLISHED)
    if spec is None or spec.loader is None or not _PUBLISHED.exists():
        return {}
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tests"))
    return cast("dict[str, dict[str, Any]]", module.PUBLISHED | module.WRAPPED)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model whose launches are counted. Its matrices have the format `form`, or 16 bits if None."""

    name: str
    config: dict[str, Any]
    form: Format | None


def subject(model: str, bits: int) -> Subject:
    """Find a published config by its name, or the config of a checkpoint by path, alias or hub id. Raises `MLXInferError`.

    Matrices are assumed to be in MLX's affine format of `bits` bits in groups of 64, or plain if 16.
    """
    form = None if bits == 16 else Format(bits, 64)
    configs = published()
    if model in configs:
        return Subject(model, configs[model], form)
    path = Path(model)
    if path.suffix == ".json" and path.exists():
        return Subject(path.stem, json.loads(path.read_text(encoding="utf-8")), form)
    try:
        checkpoint = open_checkpoint(resolve(model).path)
    except MLXInferError as error:
        raise MLXInferError(f"{error} (published configs: {', '.join(configs)})") from None
    config = checkpoint.config
    checkpoint.close()
    return Subject(model, config, form)
