"""Matrices of a layer's experts as named arrays: written to a file of experts, and replaced by the slots of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import kernels_cpu
from ..errors import ExpertFileError
from ..nn.linear import Linear
from ..nn.moe import ExpertLinear, Experts, PlainExperts
from ..nn.packing import objects
from ..nn.weights import Blocks, Dense, Format, Quantized

if TYPE_CHECKING:
    from ..expert_offload import ExpertPool, ExpertStore

AnyExperts = Experts | PlainExperts


def routed_experts(parts: object) -> Iterator[tuple[str, AnyExperts]]:
    """Yield each layer of experts in a part of a model, with its name in the graph, such as `model.layers.3.mlp.experts`."""
    for node in objects(parts):
        if isinstance(node, (Experts, PlainExperts)) and node.down.projections:
            yield node.down.projections[0].name.rpartition(".")[0], node


class RoutedTensors:
    """Names of the tensors of some layers of experts, whatever prefix a checkpoint puts before the graph's names."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys` are names of layers in the graph, as `routed_experts` yields them."""
        self._layers = frozenset(key[_core(key) :] for key in keys)

    def __contains__(self, name: object) -> bool:
        """True for `<key>.<projection>.weight` and `.bias`."""
        if not isinstance(name, str):
            return False
        start = _core(name)
        layer = name[start:].rpartition(".")[0].rpartition(".")[0]
        return layer in self._layers and "mtp." not in name[:start]


def _core(name: str) -> int:
    """Place after the prefix of a block's tensor, such as `model.`."""
    return max(name.find("layers."), 0)


def products_of(layer: AnyExperts) -> list[Linear]:
    """Return the products of a layer; the last one is `down`."""
    return [*layer.gate_up.linears, layer.down] if isinstance(layer, Experts) else [layer.up, layer.down]


def record_of(layer: AnyExperts) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Return the arrays `[experts, ...]` of a settled layer by name, and the notes with which `use_pool` reads them."""
    found: dict[str, mx.array] = {}
    notes = []
    for number, linear in enumerate(products_of(layer)):
        parts, note = _stored(linear)
        found |= {f"{number}.{name}": array for name, array in parts.items()}
        notes.append(note)
    splits = [list(cuts) for cuts in layer.gate_up.splits] if isinstance(layer, Experts) else []
    return found, {"products": notes, "splits": splits}


def _stored(linear: Linear) -> tuple[dict[str, mx.array], dict[str, Any]]:
    matrix, bias = linear.matrix, {} if linear.bias is None else {"bias": linear.bias}
    if isinstance(matrix, kernels_cpu.Packed):
        return {"data": matrix.data} | bias, {"kind": "packed", "layout": matrix.layout.numbers, "dtype": _name(matrix.dtype)}
    if isinstance(matrix, Dense):
        return {"weight": matrix.weight} | bias, {"kind": "dense"}
    form = matrix.format
    note: dict[str, Any] = {"kind": "blocks", "bits": form.bits, "group_size": form.group_size, "mode": form.mode}
    if isinstance(matrix, Quantized):
        offsets = {} if matrix.biases is None else {"biases": matrix.biases}
        return {"weight": matrix.weight, "scales": matrix.scales} | offsets | bias, note | {"kind": "quantized"}
    if isinstance(matrix, Blocks):
        return {"weight": matrix.weight} | bias, note
    raise TypeError("blocks of a GGUF file must be packed or read before they are written to a file of experts")


def use_pool(layer: AnyExperts, pool: ExpertPool, store: ExpertStore, *, precision: str | None = None) -> None:
    """Make the slots of a pool the matrices of a layer. Call it again after the pool was resized.

    `precision` is the precision of activations in packed products, as in `nn.packing.settle`. Raises `ExpertFileError` if the file's layer
    is not one of this model.
    """
    notes, arrays = pool.layer.meta, pool.arrays
    try:
        linears = [_linear(arrays, number, note, precision) for number, note in enumerate(notes["products"])]
        splits = [[int(cut) for cut in cuts] for cuts in notes["splits"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ExpertFileError(f"the file of experts has another layout ({error}): remove it and load the model again") from None
    *into, down = linears
    for linear in (*into, layer.down):
        linear.in_pool = True
    if isinstance(layer, Experts):
        for linear, before in zip(into, layer.gate_up.linears, strict=False):
            linear.projections = before.projections
        layer.gate_up.linears, layer.gate_up.splits = [*into], splits
    else:
        layer.up.matrix, layer.up.bias, layer.up.in_pool = into[0].matrix, into[0].bias, True
    layer.down.matrix, layer.down.bias = down.matrix, down.bias
    layer.ways.clear()
    slots = layer.slots
    slots.experts, slots.store, slots.pool = pool.experts, store, None if pool.is_complete else pool


def _linear(arrays: Mapping[str, mx.array], number: int, note: Mapping[str, Any], precision: str | None) -> ExpertLinear:
    def array(name: str) -> mx.array:
        return arrays[f"{number}.{name}"]

    bias, kind = arrays.get(f"{number}.bias"), note["kind"]
    if kind == "packed":
        dtype = None if note["dtype"] is None else getattr(mx, note["dtype"])
        return ExpertLinear(kernels_cpu.packed_in(array("data"), note["layout"], dtype, precision), bias)
    if kind == "dense":
        return ExpertLinear(Dense(array("weight")), bias)
    form = Format(note["bits"], note["group_size"], note["mode"])
    if kind == "blocks":
        return ExpertLinear(Blocks(array("weight"), form), bias)
    return ExpertLinear(Quantized(array("weight"), array("scales"), arrays.get(f"{number}.biases"), form), bias)


def _name(dtype: mx.Dtype | None) -> str | None:
    return None if dtype is None else str(dtype).rpartition(".")[2]
