"""Apple's chips, as far as makers and measurements tell: what the cost model takes for granted."""

from __future__ import annotations

from dataclasses import dataclass

from .primitives import Architecture

BANDWIDTHS: tuple[tuple[str, int], ...] = (
    ("M1", 68),
    ("M2, M3", 100),
    ("M4", 120),
    ("M3 Pro", 150),
    ("M5", 153),
    ("M1 Pro, M2 Pro", 200),
    ("M4 Pro", 273),
    ("M3 Max, 30 GPU cores", 300),
    ("M5 Pro", 307),
    ("M1 Max, M2 Max, M3 Max", 400),
    ("M4 Max, 32 GPU cores", 410),
    ("M5 Max, 32 GPU cores", 460),
    ("M4 Max", 546),
    ("M5 Max", 614),
    ("M1 Ultra, M2 Ultra", 800),
    ("M3 Ultra", 819),
)
"""Memory bandwidth stated by the manufacturer, GB/s."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip, with all of its GPU cores."""

    name: str
    """Apple's name."""
    gpu: Architecture
    """What MLX chooses kernels by."""
    cores: int
    """GPU cores, as Apple states them."""
    clock: float
    """Of the GPU, in 1e9 per second; Apple does not state it."""
    matrix: float = 1.0
    """Products of tiles run so many times faster than other arithmetic."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second that memory delivers, as Apple states it."""
        return max(speed for names, speed in BANDWIDTHS if self.name in names.split(", ")) * 1e9

    @property
    def instructions(self) -> float:
        """Instructions of one number each, a second: a core has 128 lanes."""
        return self.cores * 128 * self.clock * 1e9


_CLOCKS = {1: 1.278, 2: 1.398, 3: 1.398, 4: 1.578, 5: 1.62}
"""1e9 a second, by generation. M1 and M2: github.com/philipturner/metal-benchmarks, which agrees with the 2.6, 5.2, 10.4 and 21 teraflops
that Apple stated for the M1 family; M3 and M4: hmc-tech.com; M5: an assumption."""
_MATRIX_OF_M5 = 4.0
"""Apple's announcement of M5: over four times M4's peak GPU compute for AI, by units for products of matrices in each core."""

_CORES = (
    ("M1", 8), ("M1 Pro", 16), ("M1 Max", 32), ("M1 Ultra", 64),
    ("M2", 10), ("M2 Pro", 19), ("M2 Max", 38), ("M2 Ultra", 76),
    ("M3", 10), ("M3 Pro", 18), ("M3 Max", 40), ("M3 Ultra", 80),
    ("M4", 10), ("M4 Pro", 20), ("M4 Max", 40),
    ("M5", 10), ("M5 Pro", 20), ("M5 Max", 40),
)  # fmt: skip
"""GPU cores of the largest variant, from Apple's announcements (apple.com/newsroom)."""


def _chip(name: str, cores: int) -> Chip:
    number, _, size = name[1:].partition(" ")
    generation = int(number)
    letter = {"": "g", "Pro": "s", "Max": "s", "Ultra": "d"}[size]
    return Chip(name, Architecture(12 + generation, letter), cores, _CLOCKS[generation], _MATRIX_OF_M5 if generation >= 5 else 1.0)


CHIPS = tuple(_chip(name, cores) for name, cores in _CORES)
