"""Apple's chips, as inputs of the cost model."""

from __future__ import annotations

from dataclasses import dataclass

from .primitives import Architecture


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip in its largest variant."""

    name: str
    gpu: Architecture
    cores: int
    """GPU cores, as Apple states."""
    bandwidth: float
    """Memory bandwidth in bytes per second, as Apple states."""
    clock: float
    """Clock of the GPU in Hz, which Apple does not state."""
    matrix: float
    """Speed of products of tiles, relative to other arithmetic."""

    @property
    def instructions(self) -> float:
        """Instructions on one number per second. A core has 128 lanes."""
        return self.cores * 128 * self.clock


_CLOCKS = {1: 1.278e9, 2: 1.398e9, 3: 1.398e9, 4: 1.578e9, 5: 1.62e9}
"""Hz by generation. M1 and M2: github.com/philipturner/metal-benchmarks, which agrees with the 2.6, 5.2, 10.4 and 21 teraflops that Apple
stated for the M1 family. M3 and M4: hmc-tech.com. M5: an assumption."""
_MATRIX_OF_M5 = 4.0
"""Apple's announcement of M5: over four times M4's peak GPU compute for AI, by units for products of matrices in each core."""
_CHIPS = (
    ("M1", 8, 68), ("M1 Pro", 16, 200), ("M1 Max", 32, 400), ("M1 Ultra", 64, 800),
    ("M2", 10, 100), ("M2 Pro", 19, 200), ("M2 Max", 38, 400), ("M2 Ultra", 76, 800),
    ("M3", 10, 100), ("M3 Pro", 18, 150), ("M3 Max", 40, 400), ("M3 Ultra", 80, 819),
    ("M4", 10, 120), ("M4 Pro", 20, 273), ("M4 Max", 40, 546),
    ("M5", 10, 153), ("M5 Pro", 20, 307), ("M5 Max", 40, 614),
)  # fmt: skip
"""Name, GPU cores and GB/s, from Apple's announcements (apple.com/newsroom)."""


def _chip(name: str, cores: int, bandwidth: int) -> Chip:
    number, _, size = name[1:].partition(" ")
    generation = int(number)
    architecture = Architecture(12 + generation, {"": "g", "Pro": "s", "Max": "s", "Ultra": "d"}[size])
    return Chip(name, architecture, cores, bandwidth * 1e9, _CLOCKS[generation], _MATRIX_OF_M5 if generation >= 5 else 1.0)


CHIPS = tuple(_chip(*row) for row in _CHIPS)
