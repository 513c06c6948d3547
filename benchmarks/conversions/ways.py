"""Ways to make a model small: each writes a directory of a source, and says how many bits a weight takes in its format."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mlxinfer.convert import convert
from mlxinfer.convert.calibration import Calibration
from mlxinfer.convert.importance import measure
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.nn.weights import numbers

from ..ggml_quantizers import quantize
from .source import samples

Make = Callable[[Path, Path], "float | None"]
"""`make(source, target)` writes the directory, and returns bits per weight where those of the files say nothing."""


@dataclass(frozen=True, slots=True)
class Way:
    """One setting of one program."""

    engine: str
    """Whose it is; a line of the picture."""
    name: str
    """What to call it."""
    make: Make
    """Writes the model."""

    @property
    def key(self) -> str:
        """The name of its results."""
        return f"{self.engine}: {self.name}"


def ways() -> list[Way]:
    """All, in the order of how much they tell."""
    found: list[Way] = []
    for bits, kind, recipe in ((4, "Q4_K", "mixed_4_6"), (3, "Q3_K", "mixed_3_6"), (5, "Q5_K", "mixed_3_4"), (6, "Q6_K", "mixed_2_6")):
        found += [_ours(f"{bits} bits", "mx.quantize", bits=bits, encoder="minmax"), _ours(f"{bits} bits", "mlxinfer fit", bits=bits)]
        found += [Way("llama.cpp, imatrix", kind, partial(_llama_cpp, kind=kind))]
        found += [Way("mlx-lm recipes", recipe, partial(_mlx_lm, recipe=recipe))]
    found += [_ours("2 bits", "mlxinfer fit", bits=2), _ours("2 bits", "mx.quantize", bits=2, encoder="minmax")]
    found += [_calibrated(f"{bits} bits", "mlxinfer gptq", bits=bits) for bits in (4, 3, 5)]
    found += [_calibrated(f"{bpw} bpw", "mlxinfer plan", bpw=bpw) for bpw in (4.5, 4.92, 4.1, 3.5, 3.0, 5.5)]
    return [*found, Way("mlx-lm GPTQ", "4 bits", _mlx_lm_gptq)]


def _ours(name: str, engine: str, **settings: Any) -> Way:
    def make(source: Path, target: Path) -> None:
        convert(source, target, dtype="bfloat16", measure=False, **settings)

    return Way(engine, name, make)


def _calibrated(name: str, engine: str, **settings: Any) -> Way:
    """With GPTQ, which reads the same samples as the other methods that calibrate."""

    def make(source: Path, target: Path) -> None:
        texts = tuple(map(tuple, samples(source)))
        read = Calibration(texts, f"{sum(map(len, texts))} tokens of the model's own samples")
        convert(source, target, dtype="bfloat16", measure=False, encoder="gptq", calibration=read, **settings)

    return Way(engine, name, make)


def _mlx_lm(source: Path, target: Path, *, recipe: str) -> None:
    from mlx_lm import convert as convert_by_mlx_lm

    convert_by_mlx_lm(str(source), str(target), quantize=True, q_group_size=64, q_bits=4, dtype="bfloat16", quant_predicate=recipe)


def _mlx_lm_gptq(source: Path, target: Path) -> None:
    """As `mlx_lm.gptq` does it, with the same calibration as the other methods instead of a download; the head in 6 bits, its default."""
    from mlx_lm.quant.gptq import gptq_quantize
    from mlx_lm.utils import load, save

    model, tokenizer, config = load(str(source), lazy=True, return_config=True)  # type: ignore[misc]
    model.set_dtype(mx.float32)
    model, config["quantization"] = gptq_quantize(model, mx.array(samples(source)), 4, 64, 6, 64)  # type: ignore[no-untyped-call]
    model.set_dtype(mx.bfloat16)
    save(target, str(source), model, tokenizer, config)


def _imatrix(source: Path, checkpoint: SafetensorsCheckpoint) -> dict[str, np.ndarray]:
    """Mean squares of the inputs of each matrix, float32 `[in]`, while the source reads its samples; kept next to it."""
    kept = source.with_name(f"{source.name}.imatrix.npz")
    if not kept.exists():
        found = measure(checkpoint, samples(source))
        arrays: dict[str, Any] = {name: np.array(values, np.float32) for name, values in found.items()}
        np.savez(kept, **arrays)
    with np.load(kept) as found:
        return dict(found)


def _llama_cpp(source: Path, target: Path, *, kind: str) -> float:
    """Every matrix in one type, weighted with an importance matrix of the source's own samples, unpacked again for our engine.

    Blocks of 256 do not divide rows of 576: then several rows make a block row, where llama.cpp itself would take another type.
    """
    checkpoint = SafetensorsCheckpoint(source)
    importance = _imatrix(source, checkpoint)
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    tensors, bits, weights = {}, 0.0, 0
    for name in checkpoint.names():
        plain = np.array(numbers(checkpoint.read(name)), np.float32)
        matrix = plain.ndim == 2 and plain.size % size == 0
        if matrix:
            columns = math.lcm(plain.shape[1], size)
            known = importance.get(name)
            weighing = None if known is None else np.tile(known, columns // plain.shape[1])
            blocks = quantize(plain, kind, columns, weighing)
            plain = dequantize(blocks.reshape(-1, nbytes), GGMLQuantizationType[kind]).reshape(plain.shape)
        tensors[name] = mx.array(plain)
        bits, weights = bits + plain.size * (nbytes * 8 / size if matrix else 32), weights + plain.size
    checkpoint.close()
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    mx.save_safetensors(str(target / "model.safetensors"), tensors, {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
    return bits / weights
