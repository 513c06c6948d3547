"""Unpacks codes of a few bits from ggml's blocks, and packs them as MLX does."""

from __future__ import annotations

import numpy as np

_LANES = {
    3: ((3, 0x0007000700070007), (6, 0x0000003F0000003F), (12, 0x0000000000000FFF)),
    5: ((5, 0x001F001F001F001F), (10, 0x000003FF000003FF), (20, 0x00000000000FFFFF)),
    6: ((6, 0x003F003F003F003F), (12, 0x00000FFF00000FFF), (24, 0x0000000000FFFFFF)),
}
"""Masks for eight codes in a 64-bit word: bits of a lane, and the lower lane of each pair, while lanes of 8, 16 and 32 bits merge in
pairs."""


def interleave(codes: np.ndarray) -> np.ndarray:
    """Bytes `[..., n]` with codes 0..n-1 low and n..2n-1 high, to bytes with neighbouring codes in their nibbles."""
    half = codes.shape[-1] // 2
    low, high = codes & 0x0F, codes >> 4
    packed = np.empty_like(codes)
    packed[..., :half] = low[..., 0::2] | low[..., 1::2] << 4
    packed[..., half:] = high[..., 0::2] | high[..., 1::2] << 4
    return packed


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes `[..., n]` to codes `[..., 2n]`: all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def squeeze(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes below `2**bits`, one a byte, `[..., n]`, into a bit stream from the low bits up: bytes `[..., n * bits / 8]`.

    `n` is a multiple of 8, `bits` 3, 4, 5, 6 or 8.
    """
    if bits == 8:
        return codes
    if bits == 4:
        return np.asarray(codes[..., 0::2] | codes[..., 1::2] << 4)
    words = np.ascontiguousarray(codes).view("<u8")
    for step, (lane, mask) in enumerate(_LANES[bits]):
        lower = np.uint64(mask)
        words = (words & lower) | ((words >> np.uint64((8 << step) - lane)) & np.uint64(mask << lane))
    return np.ascontiguousarray(words[..., None].view(np.uint8)[..., :bits]).reshape(*codes.shape[:-1], -1)


def words(packed: np.ndarray) -> np.ndarray:
    """Bytes `[rows, blocks, n]` to uint32 `[rows, blocks * n / 4]`."""
    return np.ascontiguousarray(packed).reshape(len(packed), -1).view("<u4")


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, as float32 `[rows, blocks]`."""
    found = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")
    return np.asarray(found[..., 0], np.float32)
