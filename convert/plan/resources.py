"""Sizes of a conversion before it starts: bytes written, peak memory, and the pieces that a memory limit allows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import mlx.core as mx

from ... import kernels_cpu
from ...errors import ConversionError
from ...loading.checkpoint import Checkpoint
from ...models import architecture
from ...util.device import default_dtype
from ..write import reader
from ..write.reader import can_read_rows
from .weight_map import ConversionPlan, OutputTensor

_BASE = 160_000_000
"""Bytes of the program itself, libraries included."""
_BYTES_PER_ELEMENT = 26
"""Bytes for quantizing an element: as read, in float32, as codes and as written."""
_LEAST_BLOCK = 1 << 18
_STATES = 20
"""Bytes per token and inner dimension while a block reads a batch: gate, up, their product in float32, and one in reserve."""
_LEAST_BATCH = 512
_FACTOR = 20
"""Bytes per square of the widest input: sums in float32 for two places, factors in float64 and float32."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Sizes of the pieces in memory at a time."""

    block: int
    """Elements of a tensor quantized at once."""
    batch: int
    """Tokens that pass a block at once."""
    peak: int
    """Computed peak of resident bytes."""


@dataclass(frozen=True, slots=True)
class ConversionEstimate:
    """Sizes of a conversion, computed before it starts."""

    nbytes: int
    """Bytes to be written."""
    peak: int
    """Computed peak of resident bytes, as `Pieces.peak`."""
    bits_per_weight: float
    """Bits to be written per parameter."""


def pieces(
    checkpoint: Checkpoint, planned: ConversionPlan, *, tokens: int, batch: int, max_memory: float | None = None, factors: bool = False
) -> Pieces:
    """Return the largest pieces for which a conversion stays below `max_memory` GB; the default ones without a limit.

    `tokens` is what the model reads for the encoder in total (0 for nothing), `batch` what it reads at once. With `factors`, it sums and
    factors `x x^T` of the inputs. Raises `ConversionError` if the limit is too low.
    """
    whole = max((math.prod(o.request.shape) * 4 for o in planned.outputs if not can_read_rows(checkpoint, o.request)), default=0)
    layers = _largest_layer(planned.outputs) if tokens else 0
    layers += _widest_inputs(planned.outputs) ** 2 * _FACTOR if factors else 0
    inner = _widest(planned.outputs)
    inputs = _inputs_of_layers(planned.outputs)
    states = tokens * architecture(checkpoint.config).sizes.hidden * default_dtype().size
    layers += tokens * inputs * default_dtype().size

    def reading(count: int) -> int:
        return _BASE + layers + 2 * states + count * max(inner, inputs) * _STATES if tokens else 0

    def quantizing(elements: int) -> int:
        return _BASE + whole + elements * _BYTES_PER_ELEMENT

    if max_memory is None:
        return Pieces(reader.BLOCK, batch, max(reading(batch), quantizing(reader.BLOCK)))
    limit = round(max_memory * 1e9)
    block = min(reader.BLOCK, max(_LEAST_BLOCK, (limit - quantizing(0)) // _BYTES_PER_ELEMENT))
    batch = min(batch, max(_LEAST_BATCH, (limit - reading(0)) // max(inner * _STATES, inputs * _STATES, 1))) if tokens else batch
    peak = max(reading(batch), quantizing(block))
    if peak > limit:
        why = "a block of layers and what goes through it" if reading(batch) > quantizing(block) else "its largest tensor"
        hint = ", or the encoder minmax, which reads no text" if reading(batch) > max(limit, quantizing(block)) else ""
        raise ConversionError(f"{max_memory:g} GB are too little for {why}: give at least {peak / 1e9:.2f} GB{hint}")
    return Pieces(block, batch, peak)


def needs_importance(planned: ConversionPlan) -> bool:
    """True if any matrix is rounded, so that the importance of its inputs matters."""
    return any(output.is_rounded for output in planned.outputs)


def _largest_layer(outputs: tuple[OutputTensor, ...]) -> int:
    """Return the bytes of a block in memory: as read, and its largest tensor again."""
    sizes: dict[str, list[int]] = {}
    for output in outputs:
        if found := _LAYER.search(output.request.name):
            halves = kernels_cpu.in_use() and output.stored in (mx.bfloat16, mx.float16)
            sizes.setdefault(found[1], []).append(math.prod(output.request.shape) * (2 if halves else default_dtype().size))
    return max((sum(layer) + max(layer) for layer in sizes.values()), default=0)


def _widest(outputs: tuple[OutputTensor, ...]) -> int:
    """Return the largest number of rows or columns of a matrix in a layer, counting one expert."""
    return max((max(o.request.shape[-2:]) for o in outputs if o.request.kind == "matrix" and _LAYER.search(o.request.name)), default=0)


def _widest_inputs(outputs: tuple[OutputTensor, ...]) -> int:
    return max((o.request.shape[-1] for o in outputs if o.request.kind == "matrix" and _LAYER.search(o.request.name)), default=0)


def _inputs_of_layers(outputs: tuple[OutputTensor, ...]) -> int:
    """Return the numbers that each token brings to all layers, besides its row of the embedding (Gemma 4)."""
    return max((o.request.shape[-1] for o in outputs if o.request.name.endswith("embed_tokens_per_layer.weight")), default=0)
