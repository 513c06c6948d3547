"""Models without weights. Tensors have their shape and dtype, and share one zero."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxinfer.errors import MLXInferError
from mlxinfer.loading.find.resolve import resolve
from mlxinfer.loading.formats import packed_shapes
from mlxinfer.loading.load import open_checkpoint
from mlxinfer.nn.weights import Dense, Format, Matrix, Quantized, Recipe

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
    return cast("dict[str, dict[str, Any]]", module.PUBLISHED)


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


def zeros(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Zeros with the memory of one number."""
    return mx.broadcast_to(mx.zeros((), dtype), tuple(shape))


class EmptyWeights:
    """A `Weights` with every requested tensor."""

    def __init__(self, form: Format | None, *, tied: bool) -> None:
        self._form = form
        self._tied = tied

    def has(self, name: str) -> bool:
        return name == "lm_head.weight" and not self._tied

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        form = self._form
        if form is None or not quantizable or shape[-1] % form.group_size:
            return Dense(zeros(shape, mx.bfloat16))
        packed, groups = packed_shapes(shape, form)
        return Quantized(zeros(packed, mx.uint32), zeros(groups, mx.bfloat16), zeros(groups, mx.bfloat16), form)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        return zeros(shape, dtype or mx.bfloat16)
