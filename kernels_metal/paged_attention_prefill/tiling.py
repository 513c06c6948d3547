"""The size of a tile, from the shape of the heads."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 64
SIMDGROUPS = 8
"""At most so many in a threadgroup: their accumulators fill the registers of a core."""
TILE_BYTES = 20 * 1024
"""Threadgroup memory that a tile may take, of 32 KiB."""
CHANNELS = 256
"""Of the answer, that one simdgroup accumulates: 64 registers a lane."""
PADDING = 8
"""Values between two tokens of a tile, so that lanes of a simdgroup do not hit the same bank."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """`heads` query heads, `blocks` times 8 rows, `splits` simdgroups for the channels of one such part, `keys` tokens at a time."""

    heads: int
    blocks: int
    splits: int
    keys: int

    @property
    def rows(self) -> int:
        return 8 * self.blocks

    @property
    def threads(self) -> int:
        return 32 * self.heads * self.blocks * self.splits


def tiling(group: int, key_dim: int, value_dim: int, itemsize: int) -> Tiling:
    """For `group` query heads per KV head and values of `itemsize` bytes.

    As many heads of the group as there are simdgroups for, then as many rows as remain (a page at most): every head and every row more is
    one more that keys and values need not be brought in for. Then as many keys at a time as the memory holds: barriers are per tile of keys.
    """
    splits = -(-value_dim // CHANNELS)
    while value_dim % (8 * splits):
        splits += 1
    heads = max(n for n in range(1, group + 1) if group % n == 0 and n * splits <= max(SIMDGROUPS, splits))
    blocks = 1
    while 2 * blocks * heads * splits <= SIMDGROUPS and 8 * blocks < PAGE:
        blocks *= 2
    keys = PAGE
    while keys > 8 and keys * (max(key_dim, value_dim) + PADDING) * itemsize > TILE_BYTES:
        keys //= 2
    return Tiling(heads, blocks, splits, keys)
