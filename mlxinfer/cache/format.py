"""In how many bits a cache keeps its sealed pages."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import UnsupportedModelError
from ..kernels_metal.formats import BITS
from .base import AttentionSpec

_STEP = 8
"""Head sizes have to be a multiple of it: eight codes are whole bytes, whatever their bits."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Bits of keys and of values. `first16` keeps the first page of every sequence at 16 bits, where attention often rests."""

    k_bits: int = 16
    v_bits: int = 16
    first16: bool = False

    def __post_init__(self) -> None:
        for bits in (self.k_bits, self.v_bits):
            if bits not in BITS:
                raise UnsupportedModelError(f"keys and values cannot be kept in {bits} bits: choose of {_listed()}")

    @classmethod
    def parse(cls, text: str | int, *, first16: bool = False) -> KVFormat:
        """From "16", "8", "4"... for both, or "k8v4" for each. Raises `UnsupportedModelError`."""
        found = re.fullmatch(r"([0-9]{1,2})|k([0-9]{1,2})v([0-9]{1,2})", str(text).strip().lower())
        if not found:
            raise UnsupportedModelError(
                f"kv={text!r} is not a format of the cache: give the bits of keys and values ({_listed()}), or of each, as in k8v4"
            )
        both, keys, values = found.groups()
        chosen = cls(int(both or keys), int(both or values))
        return replace(chosen, first16=first16 and chosen.quantized)

    @property
    def quantized(self) -> bool:
        return (self.k_bits, self.v_bits) != (16, 16)

    @property
    def name(self) -> str:
        """What `parse` reads."""
        return str(self.k_bits) if self.k_bits == self.v_bits else f"k{self.k_bits}v{self.v_bits}"

    def for_layer(self, spec: AttentionSpec) -> KVFormat:
        """What this layer is kept in: 16 bits where its heads cannot be quantized."""
        return self if self.can_quantize(spec) else replace(self, k_bits=16, v_bits=16)

    @staticmethod
    def can_quantize(spec: AttentionSpec) -> bool:
        return spec.key_dim % _STEP == 0 and spec.value_dim % _STEP == 0


def _listed() -> str:
    return f"{', '.join(map(str, BITS[:-1]))} or {BITS[-1]}"
