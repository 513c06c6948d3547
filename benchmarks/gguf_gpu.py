"""What GGUF's block types cost on a GPU: how far the next token's probabilities move from those of the file's own numbers.

All matrices of a model are quantized by llama.cpp to a type, and then held as they would be on a GPU without a kernel for that type's
blocks: codes of MLX's affine formats with scales in float16. Both are computed in float32, so that only the weights differ.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.loading.checkpoint import Checkpoint
from mlxinfer.loading.gguf.mlx_formats import PACKINGS
from mlxinfer.loading.gguf.types import BLOCK_BYTES
from mlxinfer.loading.load import load_tokenizer, open_checkpoint
from mlxinfer.loading.weights import CheckpointWeights
from mlxinfer.models import build
from mlxinfer.nn.packing import settle
from mlxinfer.nn.weights import Dense, Format, Matrix, Quantized, numbers

from .ggml_quantizers import quantize
from .loss import Comparison, Loss, Rows
from .precision import PAGE_TOKENS, PAGES, ROOT
from .prose import TEXT

KINDS = ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS")
"""The types that are rounded. All others that MLX can hold are held exactly, which tests/loading/gguf shows bit by bit."""

_BLOCKS = 1 << 14
"""Blocks that are packed at a time."""
_EVERY = 4
"""Logits are compared at every fourth token: those of a page would take half a gigabyte for a vocabulary of 262,144."""

Held = Literal["source", "file", "gpu"]
"""Numbers of the model as it came; those of the blocks that llama.cpp made of them; and those of a GPU's copy of these blocks."""


@dataclass(frozen=True, slots=True)
class Row:
    """One type in one model: its own loss against the model as it came, and that of its form on a GPU against the type itself."""

    model: str
    kind: str
    file_bits: float
    gpu_bits: float
    own_kl: float
    mean_kl: float
    high_kl: float
    highest_kl: float
    same_top: float
    tokens: int


class Requantized:
    """Implements `Checkpoint`: another one, its matrices in a block type, held in one of three ways."""

    def __init__(self, checkpoint: Checkpoint, kind: str, held: Held) -> None:
        self.path, self.config = checkpoint.path, checkpoint.config
        self._checkpoint, self._kind, self._held = checkpoint, kind, held

    def names(self) -> Collection[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def nbytes(self, name: str) -> int:
        return self._checkpoint.nbytes(name)

    def stored(self, name: str) -> Format | mx.Dtype:
        return mx.float32

    def kind(self, name: str) -> str:
        return self._checkpoint.kind(name)

    def unpacked_from(self, name: str) -> str | None:
        return self._checkpoint.unpacked_from(name)

    def close(self) -> None:
        self._checkpoint.close()

    def read(self, name: str) -> Matrix:
        found = numbers(self._checkpoint.read(name))
        if found.ndim < 2 or self._held == "source":
            return Dense(found)
        blocks = quantize(np.array(found), self._kind)
        made = dequantize(blocks, GGMLQuantizationType[self._kind]) if self._held == "file" else on_gpu(blocks, self._kind)
        return Dense(mx.array(made).reshape(found.shape))


def on_gpu(blocks: np.ndarray, kind: str) -> mx.array:
    """The numbers of blocks uint8 `[blocks, block_bytes]` as a GPU holds them, in float32."""
    packing, found = PACKINGS[kind], []
    for first in range(0, len(blocks), _BLOCKS):
        weight, scales, biases = (mx.array(part) for part in packing.pack(blocks[None, first : first + _BLOCKS]))
        found.append(Quantized(weight, scales.astype(mx.float16), biases.astype(mx.float16), packing.format).dequantize(mx.float32))
        mx.eval(found[-1])
    return mx.concatenate(found, axis=1)


def measure(name: str, path: Path, kinds: tuple[str, ...] = KINDS, tokens: int = PAGE_TOKENS) -> Iterator[Row]:
    """Compare on the pages of `benchmarks.precision`, `tokens` of each. Raises `RuntimeError` without llama.cpp's quantizers."""
    pages = _pages(path, tokens)
    source = _logits(path, "", "source", pages)
    for kind in kinds:
        exact = _logits(path, kind, "file", pages)
        own, loss = _loss(source, exact, pages), _loss(exact, _logits(path, kind, "gpu", pages), pages)
        form = PACKINGS[kind].format
        bits = BLOCK_BYTES[kind] * 8, form.bits + 32 / form.group_size
        yield Row(name, kind, *bits, own.mean_kl, loss.mean_kl, loss.high_kl, loss.highest_kl, loss.same_top, loss.tokens)


def _pages(path: Path, tokens: int) -> list[list[int]]:
    checkpoint = open_checkpoint(path)
    try:
        tokenizer = load_tokenizer(checkpoint)
    finally:
        checkpoint.close()
    return [tokenizer.encode(text)[:tokens] for text in (TEXT, *((ROOT / name).read_text(encoding="utf-8") for name in PAGES))]


def _logits(path: Path, kind: str, held: Held, pages: list[list[int]]) -> list[Rows]:
    checkpoint = Requantized(open_checkpoint(path), kind, held)
    try:
        weights = CheckpointWeights(checkpoint, mx.float32)
        model = build(checkpoint.config, weights, ready=partial(settle, precision="float32"))
        weights.finish()
    finally:
        checkpoint.close()
    found = []
    for ids in pages:
        cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=len(ids) + 64, chunk=len(ids))
        step = cache.begin([Segment(cache.open(), 0, len(ids), 0, len(ids))])
        found.append(np.array(model.logits(model.hidden(mx.array(ids, mx.int32), step)[::_EVERY])))
    return found


def _loss(exact: list[Rows], other: list[Rows], pages: list[list[int]]) -> Loss:
    comparison = Comparison()
    for p, q, ids in zip(exact, other, pages, strict=True):
        comparison.add(p, q, ids[1::_EVERY])
    return comparison.loss()


def keep(rows: list[Row], path: Path) -> None:
    """Add rows, which replace older ones of the same model and type."""
    newer = {(row.model, row.kind) for row in rows}
    older = [row for row in read(path) if (row.model, row.kind) not in newer]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Row)])
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in astuple(row)] for row in older + rows)


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**{field.name: _value(field.type, row[field.name]) for field in fields(Row)}) for row in csv.DictReader(file)]


def _value(kind: Any, text: str) -> Any:
    return {"str": str, "float": float, "int": int}[str(kind)](text)


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| model | type | bits in the file | on a GPU | KL of the type itself | KL on a GPU | 99th percentile | highest | same top token |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        losses = f"{r.own_kl:.1e} | {r.mean_kl:.1e} | {r.high_kl:.1e} | {r.highest_kl:.1e}"
        lines.append(f"| {r.model} | {r.kind} | {r.file_bits:.4g} | {r.gpu_bits:.4g} | {losses} | {r.same_top:.1%} |")
    return "\n".join(lines) + "\n"
