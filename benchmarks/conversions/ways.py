"""Ways to make a model small: each writes a directory of a source, and says how many bits a weight takes in its format."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlxinfer.convert import convert
from mlxinfer.convert.calibrate.texts import Calibration
from mlxinfer.convert.encode.affine import Encoder
from mlxinfer.loading.directory import SafetensorsCheckpoint

from . import llama_cpp, mlx_lm
from .source import PIECE, PIECES, samples, written

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
    pieces: int = 0
    """How many pieces of the source's samples it reads, at most."""

    @property
    def key(self) -> str:
        """What to ask for it by."""
        return f"{self.engine}: {self.name}"

    def title(self, source: Path) -> str:
        """The name of its results, which says how many tokens were read where there could have been more."""
        read = written(source, self.pieces)
        return self.key if read in (0, PIECES) else f"{self.key}, {read * PIECE:,} tokens"


def ways() -> list[Way]:
    """All, in the order of how much they tell. Where only the layers are quantized, the embedding and the head stay in 16 bits or more, and
    the bits are those of the layers' matrices."""
    found = [_ours("mx.quantize", "4 bits", bits=4, encoder="minmax"), _ours("mlxinfer fit", "4 bits", bits=4)]
    found += [_k_quants("Q4_K_M"), _calibrated("mlxinfer gptq", "4 bits", bits=4)]
    found += [_calibrated("mlxinfer plan", f"{bpw} bpw", bpw=bpw) for bpw in (4.5, 4.92, 4.1)]
    found += [_k_quants(kind) for kind in ("Q3_K_M", "Q5_K_M", "Q4_K", "Q6_K", "Q2_K")]
    found += [_layers("mx.quantize", 4, "minmax"), _layers("mlxinfer fit", 4, "fit"), _layers("mlxinfer gptq", 4, "gptq")]
    found += [_layers("mlxinfer gptq", 3, "gptq"), _k_quants("Q4_K", layers_only=True)]
    for bits, recipe in ((3, "mixed_3_6"), (5, "mixed_4_6"), (6, "mixed_3_4"), (2, "mixed_2_6")):
        found += [_ours("mx.quantize", f"{bits} bits", bits=bits, encoder="minmax"), _ours("mlxinfer fit", f"{bits} bits", bits=bits)]
        found += [_calibrated("mlxinfer gptq", f"{bits} bits", bits=bits), _mlx_lm_recipe(recipe)]
    found += [_calibrated("mlxinfer plan", f"{bpw} bpw", bpw=bpw) for bpw in (3.5, 5.5, 3.0, 6.0, 2.7)]
    found += [_calibrated("mlxinfer plan, fit", f"{bpw} bpw", bpw=bpw, encoder="fit") for bpw in (3.5, 4.5)]
    found += [_calibrated("mlxinfer fit, of samples", f"{bits} bits", bits=bits, encoder="fit") for bits in (3, 4)]
    found += [_layers("mx.quantize", 3, "minmax")]
    first = mlx_lm.PIECES
    theirs = [("GPTQ", "4 bits", mlx_lm.gptq, first), ("dynamic", "4 and 5 bits", mlx_lm.dynamic, first)]
    theirs += [("DWQ", "4 bits", mlx_lm.dwq, PIECES)]
    return [*found, *(Way(f"mlx-lm {engine}", name, make, pieces) for engine, name, make, pieces in theirs)]


def _ours(engine: str, name: str, **settings: Any) -> Way:
    def make(source: Path, target: Path) -> None:
        convert(source, target, dtype="bfloat16", measure=False, **settings)

    return Way(engine, name, make)


def _calibrated(engine: str, name: str, **settings: Any) -> Way:
    """Reads the same samples as the other methods that calibrate."""

    def make(source: Path, target: Path) -> None:
        convert(source, target, dtype="bfloat16", measure=False, **{"encoder": "gptq", **settings}, calibration=_samples(source))

    return Way(engine, name, make, pieces=PIECES)


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

    return Way(engine, f"{bits} bits, layers only", make, pieces=PIECES if encoder == "gptq" else 0)


def _k_quants(kind: str, *, layers_only: bool = False) -> Way:
    """One type for every matrix, or one of llama.cpp's mixtures of types."""
    types = llama_cpp.in_layers(kind) if layers_only else llama_cpp.mixture(kind) if kind.endswith("_M") else llama_cpp.everywhere(kind)
    name = f"{kind}, layers only" if layers_only else kind
    return Way("llama.cpp, imatrix", name, partial(llama_cpp.quantized, types=types), pieces=PIECES)


def _mlx_lm_recipe(recipe: str) -> Way:
    return Way("mlx-lm recipes", recipe, partial(mlx_lm.recipe, name=recipe))
