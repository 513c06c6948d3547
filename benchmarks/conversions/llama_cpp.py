"""What llama.cpp's quantizers make of a model, weighted with an importance matrix of the source's own samples."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mlxinfer.convert.calibrate.importance import measure
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.nn.weights import numbers

from ..ggml_quantizers import quantize
from .source import samples

Types = Callable[[str, int], "str | None"]
"""The type of a matrix by its name and the number of layers; None leaves it as it is."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PLAIN_BITS = 32


def everywhere(kind: str) -> Types:
    """One type for every matrix, the embedding too."""
    return lambda name, layers: kind


def in_layers(kind: str) -> Types:
    """One type for the matrices of the layers; the others stay as they are."""
    return lambda name, layers: kind if _LAYER.search(name) else None


def mixture(name: str) -> Types:
    """llama.cpp's Q3_K_M, Q4_K_M or Q5_K_M for a dense model whose embedding is the head (as `llama_tensor_get_type` in its source)."""
    kind = name.removesuffix("_M")

    def more(layer: int, layers: int) -> bool:
        return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2

    def chosen(tensor: str, layers: int) -> str:
        found = _LAYER.search(tensor)
        if found is None:
            return "Q6_K"
        layer, down, value = int(found[1]), "down_proj" in tensor, "v_proj" in tensor
        if name == "Q3_K_M":
            first = (value and layer < 2) or (down and layer < layers // 16)
            return "Q5_K" if first else "Q4_K" if value or down or "o_proj" in tensor else kind
        return "Q6_K" if (value or down) and more(layer, layers) else kind

    return chosen


def keep_importance(source: Path) -> None:
    """Mean squares of the inputs of each matrix, float32 `[in]`, while the source reads its samples; kept next to it."""
    kept = source.with_name(f"{source.name}.imatrix.npz")
    if not kept.exists():
        with closing(SafetensorsCheckpoint(source)) as checkpoint:
            found = measure(checkpoint, samples(source))
        arrays: dict[str, Any] = {name: np.array(values, np.float32) for name, values in found.items()}
        made = kept.with_suffix(".making.npz")
        np.savez(made, **arrays)
        made.rename(kept)


def _imatrix(source: Path) -> dict[str, np.ndarray]:
    keep_importance(source)
    with np.load(source.with_name(f"{source.name}.imatrix.npz")) as found:
        return dict(found)


def quantized(source: Path, target: Path, *, types: Types) -> float:
    """Every matrix in its type, unpacked again for our engine. Returns bits per weight, of the layers' matrices where only those were
    quantized.

    Blocks of 256 do not divide rows of 576: then several rows make a block row, where llama.cpp itself would take another type.
    """
    importance, tensors, bits, weights = _imatrix(source), {}, 0.0, 0
    with closing(SafetensorsCheckpoint(source)) as checkpoint:
        config, layers = checkpoint.config, checkpoint.config["num_hidden_layers"]
        whole = all(types(name, layers) for name in checkpoint.names() if len(checkpoint.shape(name)) == 2)
        for name in checkpoint.names():
            plain = np.array(numbers(checkpoint.read(name)), np.float32)
            kind = types(name, layers) if plain.ndim == 2 else None
            if whole or kind:
                bits, weights = bits + plain.size * (_bits(kind) if kind else _PLAIN_BITS), weights + plain.size
            tensors[name] = mx.array(_rounded(plain, kind, importance.get(name)) if kind else plain)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    mx.save_safetensors(str(target / "model.safetensors"), tensors, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return bits / weights


def _bits(kind: str) -> float:
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return nbytes * 8 / size


def _rounded(plain: np.ndarray, kind: str, importance: np.ndarray | None) -> np.ndarray:
    """float32 `[rows, in]` as a type holds it."""
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert plain.size % size == 0
    columns = math.lcm(plain.shape[1], size)
    weighing = None if importance is None else np.tile(importance, columns // plain.shape[1])
    blocks = quantize(plain, kind, columns, weighing)
    return dequantize(blocks.reshape(-1, nbytes), GGMLQuantizationType[kind]).reshape(plain.shape)
