"""KV cache formats, and notes about each layer's format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..kernels_metal.formats import BITS
from ..util.dataclass import dataclass
from .base import AttentionSpec, BidirectionalSpec, LayerSpec, RecurrentSpec

_STEP = 8
"""Divisor of quantizable head sizes, because eight codes are whole bytes at any bit width."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Bits per key and per value."""

    k_bits: int = 16
    """Bits per key, one of `kernels_metal.formats.BITS`; 16 is the compute dtype."""
    v_bits: int = 16
    """Bits per value, from the same set."""
    first16: bool = False
    """Keep the first page of every sequence at 16 bits, because attention often concentrates there."""

    def __post_init__(self) -> None:
        for bits in (self.k_bits, self.v_bits):
            if bits not in BITS:
                raise UnsupportedModelError(f"kv takes {_listed()}, not {bits}")

    @classmethod
    def parse(cls, text: str | int, *, first16: bool = False) -> KVFormat:
        """Parse "16", "8", "4"... for keys and values, or "k8v4" for each. Raises `UnsupportedModelError`."""
        found = re.fullmatch(r"([0-9]{1,2})|k([0-9]{1,2})v([0-9]{1,2})", str(text).strip().lower())
        if not found:
            raise UnsupportedModelError(
                f"kv={text!r} is not a format of the cache: give the bits of keys and values ({_listed()}), or of each, as in k8v4"
            )
        both, keys, values = found.groups()
        chosen = cls(int(both or keys), int(both or values))
        if first16 and not chosen.quantized:
            raise UnsupportedModelError("kv_first16 needs kv 8, 4 or k8v4 as well")
        return replace(chosen, first16=first16)

    @property
    def quantized(self) -> bool:
        """True if keys or values have fewer than 16 bits."""
        return (self.k_bits, self.v_bits) != (16, 16)

    @property
    def name(self) -> str:
        """Text that `parse` accepts."""
        return str(self.k_bits) if self.k_bits == self.v_bits else f"k{self.k_bits}v{self.v_bits}"

    def for_layer(self, spec: AttentionSpec) -> KVFormat:
        """Return the format of a layer; 16 bits if its heads cannot be quantized."""
        return self if self.can_quantize(spec) else replace(self, k_bits=16, v_bits=16)

    @staticmethod
    def can_quantize(spec: AttentionSpec) -> bool:
        """Return True if the head sizes allow quantization."""
        return spec.key_dim % _STEP == 0 and spec.value_dim % _STEP == 0


def _listed() -> str:
    return f"{', '.join(map(str, BITS[:-1]))} or {BITS[-1]}"


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """MeasuredLoss of a quantized cache compared with the same model and a 16-bit cache."""

    model: str
    kl: float
    """Mean KL divergence of the next-token distribution, in nats."""
    top1: float
    """Share of positions with the same most likely token."""


MEASURED: dict[str, tuple[MeasuredLoss, ...]] = {
    "8": (MeasuredLoss("SmolLM2 135M", 3.3e-05, 0.999), MeasuredLoss("Gemma 3 270M", 2.4e-05, 0.997)),
    "k8v4": (MeasuredLoss("SmolLM2 135M", 0.0021, 0.979), MeasuredLoss("Gemma 3 270M", 0.0024, 0.978)),
    "k6v4": (MeasuredLoss("SmolLM2 135M", 0.0025, 0.974), MeasuredLoss("Gemma 3 270M", 0.0028, 0.971)),
    "k5v4": (MeasuredLoss("SmolLM2 135M", 0.0037, 0.971), MeasuredLoss("Gemma 3 270M", 0.0035, 0.971)),
    "4": (MeasuredLoss("SmolLM2 135M", 0.008, 0.959), MeasuredLoss("Gemma 3 270M", 0.0071, 0.961)),
    "3": (MeasuredLoss("SmolLM2 135M", 0.04, 0.894), MeasuredLoss("Gemma 3 270M", 0.032, 0.912)),
    "2": (MeasuredLoss("SmolLM2 135M", 0.39, 0.700), MeasuredLoss("Gemma 3 270M", 0.23, 0.770)),
}
"""Results of `python -m benchmarks kv-quality` over 1,024 tokens of text, by `KVFormat.name`."""


def loss_line(kv: KVFormat) -> str | None:
    """Return the measured loss of a format; None for 16 bits."""
    if not kv.quantized:
        return None
    losses = MEASURED.get(kv.name)
    if not losses:
        return f"the cache is quantized (kv {kv.name}), which loses quality; how much has not been measured for this format"
    shown = "; ".join(f"{loss.model}: KL {loss.kl:.2g}, {loss.top1:.1%} the same top token" for loss in losses)
    return f"the cache is quantized (kv {kv.name}); measured against 16 bits, {shown}"


def layer_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Return one line per group of layers with equal storage."""
    return by_layers({index: _kept(spec, kv, dtype) for index, spec in enumerate(layers)})


def by_layers(found: Mapping[int, str]) -> list[str]:
    """Return one line `layers 0-4, 6: text` per distinct text."""
    alike: dict[str, list[int]] = {}
    for index, text in found.items():
        alike.setdefault(text, []).append(index)
    return [f"{'layer' if len(indices) == 1 else 'layers'} {_ranges(indices)}: {text}" for text, indices in alike.items()]


def unquantized_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Return the layers that stay at 16 bits although `kv` has fewer."""
    if not kv.quantized or all(isinstance(s, AttentionSpec) and kv.can_quantize(s) for s in layers):
        return []
    return [f"cache of {line}" for line in layer_lines(layers, kv, dtype)]


def _kept(spec: LayerSpec, kv: KVFormat, dtype: mx.Dtype) -> str:
    if isinstance(spec, RecurrentSpec):
        return "a recurrent state in float32, of one size whatever the context" + (", never quantized" if kv.quantized else "")
    if isinstance(spec, BidirectionalSpec):
        return "nothing: each text is computed whole"
    if not isinstance(spec, AttentionSpec):
        return "mlx-lm's own cache, unquantized"
    reach = "the whole context" if spec.window is None else f"a window of {spec.window} tokens"
    return f"keys and values of {reach}, {_bits(spec, kv, _name(dtype))}"


def _bits(spec: AttentionSpec, kv: KVFormat, plain: str) -> str:
    if not kv.quantized:
        return plain
    if not kv.can_quantize(spec):
        dims = " and ".join(map(str, sorted({spec.key_dim, spec.value_dim})))
        return f"{plain} (not quantized: head size {dims} is not a multiple of 8)"
    keys, values = (plain if bits == 16 else f"{bits} bits" for bits in (kv.k_bits, kv.v_bits))
    both = f"keys {keys}, values {values}" if keys != values else keys
    return both + (f", a sequence's first page {plain}" if kv.first16 else "")


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _ranges(indices: Iterable[int]) -> str:
    """Return numbers as `0-4, 6, 8-9`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
