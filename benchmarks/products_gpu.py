"""Products of few rows with quantized matrices on a GPU: the bandwidth that they reach, and their speed next to MLX's.

Matrices are 4096 by 4096, twice as large for gated products, 64 MB of them one after another, so that no cache holds them. The bytes are
those of the matrix, read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from mlxinfer.kernels_metal.quantized_matmul import trial
from mlxinfer.kernels_metal.quantized_matmul.block_formats import BLOCKS

SUBJECTS = (
    *(trial.Subject("affine", bits, 64, mx.bfloat16) for bits in (2, 3, 4, 5, 6, 8)),
    trial.Subject("affine", 4, 32, mx.float16),
    trial.Subject("mxfp4", 4, 32, mx.bfloat16),
    trial.Subject("affine", 4, 64, mx.bfloat16, "silu"),
    *(trial.Subject(kind, form.bits, form.group, mx.bfloat16) for kind, form in BLOCKS.items()),
)


@dataclass(frozen=True, slots=True)
class Result:
    """A variant for one format."""

    name: str
    """The format and the dtype of the activations."""
    rows: int
    """Rows of the product."""
    speed: trial.Speed
    """Its time, and that of MLX's product."""
    bytes: int
    """Bytes of the matrix."""

    @property
    def bandwidth(self) -> float:
        """Bytes of the matrix per second."""
        return self.bytes / self.speed.seconds


def measure(subjects: tuple[trial.Subject, ...] = SUBJECTS, seconds: float = 1.0) -> Iterator[Result]:
    """Every variant for each format, `seconds` per format. Raises RuntimeError for a kernel that is wrong."""
    for subject in subjects:
        if problem := trial.why_untrusted(subject):
            raise RuntimeError(f"{subject.name}: {problem}")
        size = subject.nbytes(trial.WIDTH**2 * subject.sides)
        for rows, speed in trial.speeds(subject, seconds).items():
            yield Result(subject.name, rows, speed, size)


def table(results: Iterator[Result], copied: float) -> str:
    """Markdown; `copied` is the bandwidth of copying, in bytes per second."""
    lines = ["| format | rows | us | GB/s | of copying | next to MLX | |", "|---|---:|---:|---:|---:|---:|---|"]
    for r in results:
        mark = "stalled" if r.speed.stalled else ""
        cells = (
            f"{1e6 * r.speed.seconds:.1f}",
            f"{r.bandwidth / 1e9:.0f}",
            f"{r.bandwidth / copied:.0%}",
            f"{r.speed.times_mlx:.2f}x",
            mark,
        )
        lines.append(f"| {r.name} | {r.rows} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
