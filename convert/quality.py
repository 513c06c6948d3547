"""What a conversion costs, measured in the probabilities of the next token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import kernels_cpu
from ..evaluation.measure import POSITIONS, Reading, compare
from ..loading.formats import dtype_name
from ..loading.weights import Progress
from ..util.device import default_dtype, device_memory, is_gpu
from .report import Quality

LEAST_TOKENS = 128
"""Fewer positions say nothing."""
_CHECKED = 512
"""Positions where nothing was asked to be quantized: formats that hold the same codes lose hardly anything."""
_SECONDS = 45
"""For both models together, unless a comparison was asked for."""
_GPU_RATE, _KERNELS_RATE, _PLAIN_RATE = 1e12, 2.5e10, 1e9
"""Multiplications and additions a second while a text is read, about: a small Apple GPU (computed), two cores with the CPU kernels and
without."""


def tokens_to_measure(parameters: int, *, required: bool = False, quantized: bool = True) -> int:
    """Count the positions that can be compared within a minute and within memory; fewer where nothing is `quantized`. Too few to mean
    anything are 0, unless the comparison is `required`."""
    if required:
        return POSITIONS
    if parameters * default_dtype().size > device_memory().usable / 2:
        return 0
    rate = _GPU_RATE if is_gpu() else _KERNELS_RATE if kernels_cpu.in_use() else _PLAIN_RATE
    count = min(POSITIONS if quantized else _CHECKED, int(_SECONDS * rate / (2 * max(parameters, 1))))
    return count if count >= LEAST_TOKENS else 0


def measure_loss(
    source: Path, converted: Path, parameters: int, count: int, *, memory_gb: float | None = None, progress: Progress | None = None
) -> Quality:
    """The two models compared at `count` positions of the text that is shipped; one model is in memory at a time, a block of it where
    `memory_gb` is too little for that. `progress` is called with (positions read, positions in all), those of both models. Raises
    `MLXInferError`s."""
    settings = _settings(parameters) | ({} if memory_gb is None else {"memory_gb": memory_gb})
    read: dict[str, int] = {}

    def tell(what: str, done: int, total: int) -> None:
        read[what] = done
        if progress:
            progress(sum(read.values()), 2 * total)

    found = compare(source, [converted], Reading(positions=count, settings=settings), tell)
    figures = found.students[0]
    return Quality(
        kl=figures.kl_mean or 0.0,
        top1=figures.top1 or 0.0,
        tokens=figures.positions,
        kl_stderr=figures.kl_stderr,
        kl_p99=figures.kl_p99 or 0.0,
        top1_stderr=figures.top1_stderr,
        perplexity_ratio=figures.ppl_ratio or 1.0,
        text=found.text.name,
        text_sha256=found.text.digest,
    )


def _settings(parameters: int) -> dict[str, Any]:
    """float32 where the memory has room for it: in 16 bits, the rounding of activations adds to what is measured."""
    room = parameters * 4 <= device_memory().usable / 2
    return {"dtype": "float32" if room else dtype_name(default_dtype())}
