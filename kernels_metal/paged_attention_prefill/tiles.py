"""Size of a prefill tile, from the shape of the heads."""

from __future__ import annotations

from dataclasses import dataclass

from ..paged_attention.tiles import PAGE, Shape

SIMDGROUPS = 8
"""Maximum simdgroups in a threadgroup: their sums fill the registers of a core."""
ROOM_BYTES = 20 * 1024
"""Bytes of threadgroup memory for keys or values, of 32 KiB."""
CHANNELS = 256
"""Channels of the answer per simdgroup: 64 registers per lane."""
PADDING = 8
"""Unused values between two tokens in threadgroup memory, so that the lanes of a simdgroup do not access the same bank."""


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """The work of one threadgroup."""

    heads: int
    blocks: int
    """Blocks of 8 rows per head."""
    splits: int
    """Simdgroups that share the channels of a block."""
    keys: int
    """Tokens whose keys or values are in threadgroup memory together."""

    @property
    def rows(self) -> int:
        """Query rows."""
        return 8 * self.blocks

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.heads * self.blocks * self.splits


def prefill_tile(shape: Shape) -> PrefillTile:
    """Choose as many heads of the group as there are simdgroups, then as many rows as fit, at most a page, because all share the loaded
    keys and values. Then choose as many keys as fit in threadgroup memory, because each load costs barriers."""
    splits = -(-shape.value_dim // CHANNELS)
    heads = max(n for n in range(1, shape.group + 1) if shape.group % n == 0 and n * splits <= SIMDGROUPS)
    blocks = 1
    while 2 * blocks * heads * splits <= SIMDGROUPS and 8 * blocks < PAGE:
        blocks *= 2
    keys = PAGE
    while keys > 8 and keys * (max(shape.key_dim, shape.value_dim) + PADDING) * shape.dtype.size > ROOM_BYTES:
        keys //= 2
    return PrefillTile(heads, blocks, splits, keys)
