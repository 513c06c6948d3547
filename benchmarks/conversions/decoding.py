"""What decoding costs a GPU next to what it reads: `python -m benchmarks.conversions.decoding` prints the table of docs/beyond-affine.md.

All of it is computed. An Apple core has 128 lanes, and integer multiplications and shifts, which run at a quarter of that
(github.com/philipturner/metal-benchmarks); a product is as fast as its slowest part. A core's share of the memory's bandwidth says how many
weights arrive in a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..launches.chips import CHIPS, Chip

_LANES, _SLOW_LANES = 128, 32


@dataclass(frozen=True, slots=True)
class Code:
    """What one weight takes."""

    name: str
    """What to call it."""
    bits: float
    """Bits that are read, scales included."""
    instructions: float
    """Instructions in all."""
    slow: float
    """Multiplications of integers and shifts among them."""

    def rate(self, chip: Chip) -> float:
        """Weights that a core can take in a cycle."""
        return min(_arriving(chip) * 8 / self.bits, _LANES / self.instructions, _SLOW_LANES / self.slow if self.slow else _LANES)

    def limit(self, chip: Chip) -> str:
        """What bounds it."""
        return "memory" if self.rate(chip) >= _arriving(chip) * 8 / self.bits * 0.999 else "arithmetic"


def _arriving(chip: Chip) -> float:
    """Bytes that arrive in a cycle of a core."""
    return chip.bandwidth / (chip.cores * chip.clock * 1e9)


AFFINE = Code("affine, 4 bits", 4.5, 3, 0)
"""A mask, a conversion and a product that is added; the shift is in the activations, which are scaled beforehand (as MLX does it)."""
TRELLIS = (Code("trellis, 3 bits", 3, 7, 2), Code("trellis, 4 bits", 4, 7, 2))
"""A window of 16 bits (one shift, if it lies in one word), a multiplication, two of logic, a conversion, a sum of halves, a product."""


def table() -> str:
    """By chip: how much faster than 4-bit affine, how much faster the bytes promise, and the share of it that is kept."""
    text = (
        "| chip | bytes a cycle and core | 3 bits: speed, promised, kept | 4 bits: speed, promised, kept |\n| --- | ---: | ---: | ---: |\n"
    )
    for chip in CHIPS:
        cells = []
        for code in TRELLIS:
            speed, promised = code.rate(chip) / AFFINE.rate(chip), AFFINE.bits / code.bits
            cells.append(f"{speed:.2f}, {promised:.2f}, {speed / promised:.2f} ({code.limit(chip)})")
        text += f"| {chip.name} | {_arriving(chip):.1f} | {' | '.join(cells)} |\n"
    return text


if __name__ == "__main__":
    print(table())
