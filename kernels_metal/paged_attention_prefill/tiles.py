"""The size of a prefill tile, from the shape of the heads."""

from __future__ import annotations

from dataclasses import dataclass

from ..paged_attention.tiles import PAGE, Shape

SIMDGROUPS = 8
"""At most so many in a threadgroup: their sums fill the registers of a core."""
ROOM_BYTES = 20 * 1024
"""Threadgroup memory that keys or values may take, of 32 KiB."""
CHANNELS = 256
"""Of the answer, that one simdgroup adds up: 64 registers a lane."""
PADDING = 8
"""Values between two tokens in the room, so that lanes of a simdgroup do not meet in the same bank."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
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


def prefill_tile(shape: Shape) -> PrefillTile:
    """As many heads of the group as there are simdgroups for, then as many rows as remain, a page at most: for every one of them keys and
    values need not be brought in again. Then as many keys at a time as there is room for: barriers are per room.
    """
    splits = -(-shape.value_dim // CHANNELS)
    heads = max(n for n in range(1, shape.group + 1) if shape.group % n == 0 and n * splits <= SIMDGROUPS)
    blocks = 1
    while 2 * blocks * heads * splits <= SIMDGROUPS and 8 * blocks < PAGE:
        blocks *= 2
    keys = PAGE
    while keys > 8 and keys * (max(shape.key_dim, shape.value_dim) + PADDING) * shape.dtype.size > ROOM_BYTES:
        keys //= 2
    return PrefillTile(heads, blocks, splits, keys)
