"""A tensor in the destination's safetensors files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor in the destination's safetensors files."""

    name: str
    """Name in the header."""
    dtype: str
    """Dtype in safetensors' notation."""
    shape: tuple[int, ...]
    """Shape as stored."""
    nbytes: int
    """Bytes of the data."""
