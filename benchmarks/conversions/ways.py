"""Ways to make a model small: each writes a directory of a source, and says how many bits a weight takes in its format."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import closing
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
from mlxinfer.convert.encoders import Encoder
from mlxinfer.convert.importance import measure
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.nn.weights import numbers

from ..ggml_quantizers import quantize
from .beyond import emulated_trellis, q4_k_by_feedback
from .source import samples

Make = Callable[[Path, Path], "float | None"]
"""`make(source, target)` writes the directory, and returns bits per weight where those of the files say nothing."""


_MLX_LM_PIECES = 1
"""Pieces of the samples that it reads: more of them take it hours on a CPU."""


@dataclass(frozen=True, slots=True)
class Way:
    """One setting of one program."""

    engine: str
    """Whose it is; a line of the picture."""
    name: str
    """What to call it."""
    make: Make
    """Writes the model."""
    calibrated: bool = False
    """Whether it reads the source's samples."""
    hessians: bool = False
    """Whether it reads what `beyond` keeps of them."""

    @property
    def key(self) -> str:
        """The name of its results."""
        return f"{self.engine}: {self.name}"


def ways() -> list[Way]:
    """All, in the order of how much they tell. Where only the layers are quantized, the embedding and the head stay in 16 bits or more, and
    the bits are those of the layers' matrices."""
    found = [_ours("mx.quantize", "4 bits", bits=4, encoder="minmax"), _ours("mlxinfer fit", "4 bits", bits=4)]
    found += [_calibrated("mlxinfer gptq", "4 bits", bits=4)]
    found += [_calibrated("mlxinfer plan", f"{bpw} bpw", bpw=bpw) for bpw in (4.5, 4.92, 4.1)]
    found += [_k_quants("Q4_K"), _k_quants("Q4_K", head="Q6_K")]
    found += [_layers("mx.quantize", 4, "minmax"), _layers("mlxinfer fit", 4, "fit"), _layers("mlxinfer gptq", 4, "gptq")]
    found += [_layers("mlxinfer gptq", 3, "gptq"), _k_quants("Q4_K", layers_only=True)]
    found += [_studied("GPTQ into Q4_K", "layers only", q4_k_by_feedback)]
    found += [_studied("trellis, emulated", f"{bits} bits, layers only", emulated_trellis(bits)) for bits in (4, 3, 5)]
    for bits, kind, recipe in ((3, "Q3_K", "mixed_3_6"), (5, "Q5_K", "mixed_4_6"), (6, "Q6_K", "mixed_3_4"), (2, "Q2_K", "mixed_2_6")):
        found += [_ours("mx.quantize", f"{bits} bits", bits=bits, encoder="minmax"), _ours("mlxinfer fit", f"{bits} bits", bits=bits)]
        found += [_calibrated("mlxinfer gptq", f"{bits} bits", bits=bits), _k_quants(kind), _mlx_lm_recipe(recipe)]
    found += [_calibrated("mlxinfer plan", f"{bpw} bpw", bpw=bpw) for bpw in (3.5, 5.5, 3.0, 6.0, 2.7)]
    found += [_calibrated("mlxinfer plan, fit", "4.5 bpw", bpw=4.5, encoder="fit"), _layers("mx.quantize", 3, "minmax")]
    return [*found, Way("mlx-lm GPTQ", "4 bits", _mlx_lm_gptq, calibrated=True)]


def _ours(engine: str, name: str, **settings: Any) -> Way:
    def make(source: Path, target: Path) -> None:
        convert(source, target, dtype="bfloat16", measure=False, **settings)

    return Way(engine, name, make)


def _calibrated(engine: str, name: str, **settings: Any) -> Way:
    """Reads the same samples as the other methods that calibrate."""

    def make(source: Path, target: Path) -> None:
        convert(source, target, dtype="bfloat16", measure=False, **{"encoder": "gptq", **settings}, calibration=_samples(source))

    return Way(engine, name, make, calibrated=True)


def _samples(source: Path) -> Calibration:
    texts = tuple(map(tuple, samples(source)))
    return Calibration(texts, f"{sum(map(len, texts))} tokens of the model's own samples")


def _layers(engine: str, bits: int, encoder: Encoder, group: int = 64) -> Way:
    """Only the layers quantized, all alike."""

    def make(source: Path, target: Path) -> float:
        with closing(SafetensorsCheckpoint(source)) as checkpoint:
            matrices = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
        tensors = {name: {"bits": bits, "group_size": group} if ".layers." in name else False for name in matrices}
        plan = target.with_name(f"{target.name}.plan.json")
        plan.write_text(json.dumps({"tensors": tensors}), encoding="utf-8")
        read = _samples(source) if encoder == "gptq" else None
        convert(source, target, dtype="bfloat16", measure=False, encoder=encoder, plan=plan, calibration=read)
        return bits + 32 / group

    return Way(engine, f"{bits} bits, layers only", make, calibrated=encoder == "gptq")


def _studied(engine: str, name: str, make: Make) -> Way:
    return Way(engine, name, make, calibrated=True, hessians=True)


def _k_quants(kind: str, *, head: str | None = None, layers_only: bool = False) -> Way:
    name = f"{kind}, head {head}" if head else f"{kind}, layers only" if layers_only else kind
    make = partial(_llama_cpp, kind=kind, head=None if layers_only else head or kind)
    return Way("llama.cpp, imatrix", name, make, calibrated=True)


def _mlx_lm_recipe(recipe: str) -> Way:
    return Way("mlx-lm recipes", recipe, partial(_mlx_lm, recipe=recipe))


def _mlx_lm(source: Path, target: Path, *, recipe: str) -> None:
    from mlx_lm import convert as convert_by_mlx_lm

    convert_by_mlx_lm(str(source), str(target), quantize=True, q_group_size=64, q_bits=4, dtype="bfloat16", quant_predicate=recipe)


def _mlx_lm_gptq(source: Path, target: Path) -> None:
    """As `mlx_lm.gptq` does it, with the same calibration as the other methods instead of a download; the head in 6 bits, its default."""
    from mlx_lm.quant.gptq import gptq_quantize
    from mlx_lm.utils import load, save

    model, tokenizer, config = load(str(source), lazy=True, return_config=True)  # type: ignore[misc]
    model.set_dtype(mx.float32)
    model, config["quantization"] = gptq_quantize(model, mx.array(samples(source, _MLX_LM_PIECES)), 4, 64, 6, 64)  # type: ignore[no-untyped-call]
    model.set_dtype(mx.bfloat16)
    save(target, str(source), model, tokenizer, config)


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


def _llama_cpp(source: Path, target: Path, *, kind: str, head: str | None) -> float:
    """Every matrix of the layers in one type, the embedding in `head` (None: as it is), weighted with an importance matrix of the source's
    own samples, unpacked again for our engine. Returns bits per weight, of the layers' matrices where only those were quantized.

    Blocks of 256 do not divide rows of 576: then several rows make a block row, where llama.cpp itself would take another type.
    """
    importance = _imatrix(source)
    checkpoint = SafetensorsCheckpoint(source)
    tensors, bits, weights = {}, 0.0, 0
    for name in checkpoint.names():
        plain = np.array(numbers(checkpoint.read(name)), np.float32)
        form = kind if ".layers." in name else head
        if plain.ndim == 2 and form:
            plain = _rounded(plain, form, importance.get(name))
        if head or (plain.ndim == 2 and ".layers." in name):
            bits, weights = bits + plain.size * (_bits(form) if plain.ndim == 2 and form else 32), weights + plain.size
        tensors[name] = mx.array(plain)
    config = checkpoint.config
    checkpoint.close()
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
