"""GGUF's block formats that the kernels multiply."""

from __future__ import annotations

from ...util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A type of ggml."""

    id: int
    """Its number in GGUF files, which the kernels know it by."""
    numbers: int
    bytes: int
    bits: int
    group: int
    """Numbers that share a scale."""
    halves: tuple[int, ...] = (0,)
    """Offsets of float16 numbers in a block, in bytes."""


BLOCKS = {
    "Q4_0": BlockFormat(2, 32, 18, 4, 32),
    "Q5_0": BlockFormat(6, 32, 22, 5, 32),
    "Q8_0": BlockFormat(8, 32, 34, 8, 32),
    "Q4_K": BlockFormat(12, 256, 144, 4, 32, (0, 2)),
    "Q5_K": BlockFormat(13, 256, 176, 5, 32, (0, 2)),
    "Q6_K": BlockFormat(14, 256, 210, 6, 16, (208,)),
}
"""By ggml's name."""
