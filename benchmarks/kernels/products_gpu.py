"""Measures products of few rows with quantized matrices on a GPU: their bandwidth, and their speed compared with MLX's.

Matrices are 4096 by 4096, those of one row as wide as their class of shapes; twice as large for gated products. 64 MB of them follow one
another, so they fit into no cache. The bytes are those of the matrix, read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click
import mlx.core as mx

from mlxinfer.kernels_metal.kernel_trial import Speed
from mlxinfer.kernels_metal.quantized_matmul import trial
from mlxinfer.kernels_metal.quantized_matmul.block_formats import BLOCKS
from mlxinfer.kernels_metal.quantized_matmul.launcher import ROW_WIDTHS

SUBJECTS = (
    *(trial.Subject("affine", 4, 64, mx.bfloat16, shape=shape) for shape in ROW_WIDTHS),
    *(trial.Subject("affine", bits, 64, mx.bfloat16, shape="wide") for bits in (2, 3, 5, 6, 8)),
    trial.Subject("affine", 4, 32, mx.float16, shape="wide"),
    trial.Subject("mxfp4", 4, 32, mx.bfloat16, shape="wide"),
    trial.Subject("affine", 4, 64, mx.bfloat16, "silu", shape="wide"),
    *(trial.Subject("affine", bits, 64, mx.bfloat16) for bits in (2, 3, 4, 5, 6, 8)),
    trial.Subject("affine", 4, 32, mx.float16),
    trial.Subject("mxfp4", 4, 32, mx.bfloat16),
    trial.Subject("affine", 4, 64, mx.bfloat16, "silu"),
    *(trial.Subject(kind, form.bits, form.group, mx.bfloat16) for kind, form in BLOCKS.items()),
)


@dataclass(frozen=True, slots=True)
class Result:
    """A product of `rows` rows. `name` is the format and the dtype of the activations, `bytes` those of the matrix."""

    name: str
    rows: int
    speed: Speed
    bytes: int


def measure(subjects: tuple[trial.Subject, ...] = SUBJECTS, seconds: float = 1.0) -> Iterator[Result]:
    """Measure every variant for each format, `seconds` per format. Raises `click.ClickException` for a kernel with wrong results."""
    for subject in subjects:
        if fault := trial.wrong_products(subject):
            raise click.ClickException(f"{subject.name}: the kernel failed its trial: {fault}")
        size = subject.nbytes(subject.width**2 * subject.sides)
        for rows, speed in trial.speeds(subject, seconds).items():
            yield Result(subject.name, rows, speed, size)


def table(results: Iterator[Result], copied: float) -> str:
    """Markdown. `copied` is the copy bandwidth, in bytes per second."""
    lines = ["| format | rows | us | GB/s | of copying | compared with MLX | |", "|---|---:|---:|---:|---:|---:|---|"]
    for r in results:
        bandwidth, mark = r.bytes / r.speed.seconds, "stalled" if r.speed.stalled else ""
        cells = f"{1e6 * r.speed.seconds:.1f} | {bandwidth / 1e9:.0f} | {bandwidth / copied:.0%} | {r.speed.times_mlx:.2f}x | {mark}"
        lines.append(f"| {r.name} | {r.rows} | {cells} |")
    return "\n".join(lines) + "\n"
