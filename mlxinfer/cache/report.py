"""What a cache keeps of each layer, and why, in lines that a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from .base import AttentionSpec, LayerSpec, RecurrentSpec
from .format import KVFormat


def layer_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """One line for all layers that are kept alike."""
    return by_layers({index: _kept(spec, kv, dtype) for index, spec in enumerate(layers)})


def by_layers(found: Mapping[int, str]) -> list[str]:
    """`layers 0-4, 6: ...` for each of the texts."""
    alike: dict[str, list[int]] = {}
    for index, text in found.items():
        alike.setdefault(text, []).append(index)
    return [f"{'layer' if len(indices) == 1 else 'layers'} {_ranges(indices)}: {text}" for text, indices in alike.items()]


def unquantized_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Those of the layers that `kv` does not reach, though it asks for fewer bits."""
    if not kv.quantized or all(isinstance(s, AttentionSpec) and kv.can_quantize(s) for s in layers):
        return []
    return [f"cache of {line}" for line in layer_lines(layers, kv, dtype)]


def _kept(spec: LayerSpec, kv: KVFormat, dtype: mx.Dtype) -> str:
    if isinstance(spec, RecurrentSpec):
        return "a recurrent state in float32, of one size whatever the context" + (", never quantized" if kv.quantized else "")
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
    """`0-4, 6, 8-9`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
