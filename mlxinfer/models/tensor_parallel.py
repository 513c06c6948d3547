"""Tensor parallelism: each machine has a shard of all heads and columns, and the partial results are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..nn.linear import Linear
from ..nn.norms import RMSNorm
from ..nn.weights import FLOAT8, Dense, Matrix, Quantized, Recipe, Weights, map_rows
from ..util.dataclass import dataclass
from .decoder import BlockStack
from .native.fused_blocks import Run

_USUAL_HEADS = frozenset({"llama", "mistral", "granite", "smollm3", "qwen2", "qwen3"})
"""`model_type`s whose `head_dim` defaults to `hidden_size / num_attention_heads`."""
FAMILIES = _USUAL_HEADS | {"ernie4_5", "exaone4", "gemma2", "gemma3_text", "hunyuan_v1_dense", "ministral3", "seed_oss"}
"""`model_type`s whose blocks have plain attention and a gated feed-forward layer, without a norm over all heads."""
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Projections divided by rows: heads or channels."""
BY_COLUMNS = ("o_proj", "down_proj")
"""Projections divided by columns."""
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True, slots=True)
class Shard:
    """A machine's shard of every block."""

    rank: int
    """Rank, from 0."""
    count: int


def shared_config(config: dict[str, Any], share: Shard) -> dict[str, Any]:
    """Return the config of a model with a shard's widths. Raises `UnsupportedModelError` if it cannot be divided."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedModelError(f"{kind} cannot be divided by heads and columns, only by layers: leave out --split tensor")
    told = ("hidden_size", "num_attention_heads", "intermediate_size")
    for key in told if kind in _USUAL_HEADS else (*told, "num_key_value_heads", "head_dim"):
        if type(config.get(key)) is not int or config[key] < 1:
            raise UnsupportedModelError(f"the config does not say {key}, which machines share: leave out --split tensor")
    heads = config["num_attention_heads"]
    missing = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
    # Other nulls stay: a null window means no window, a missing one the family's default.
    whole = config | {key: value for key, value in missing.items() if config.get(key) is None}
    for key in _DIVIDED:
        if whole[key] % share.count:
            raise UnsupportedModelError(f"{key} is {whole[key]}, which {share.count} machines cannot share: leave out --split tensor")
    return whole | {key: whole[key] // share.count for key in _DIVIDED}


class ShardWeights:
    """Implements `Weights` for a shard: returns its part of each whole tensor."""

    def __init__(self, whole: Weights, share: Shard) -> None:
        self._whole, self._share = whole, share

    def has(self, name: str) -> bool:
        return self._whole.has(name)

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        part, count = name.split(".")[-2], self._share.count
        out, into = shape[-2:]
        if part in BY_ROWS:
            found = self._whole.matrix(name, (out * count, into), quantizable=quantizable)
            first = self._share.rank * out
            return map_rows(found, lambda rows: _copied(rows, slice(first, first + out), -2))
        if part in BY_COLUMNS:
            return _columns(name, self._whole.matrix(name, (out, into * count), quantizable=quantizable), self._share.rank * into, into)
        return self._whole.matrix(name, shape, otherwise=otherwise, quantizable=quantizable)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        part = name.split(".")[-2]
        if part in BY_ROWS:
            first = self._share.rank * shape[0]
            whole = self._whole.vector(name, (shape[0] * self._share.count,), dtype=dtype)
            return _copied(whole, slice(first, first + shape[0]), 0)
        found = self._whole.vector(name, shape, otherwise=otherwise, dtype=dtype)
        return mx.zeros_like(found) if part in BY_COLUMNS and self._share.rank else found


class SummedLinear(Linear):
    """A projection divided by columns, whose results are summed over all machines."""

    def __init__(self, base: Linear, add: Callable[[mx.array], mx.array]) -> None:
        self.base, self.add = base, add
        self.projections = base.projections

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """See `Linear`."""
        y = self.add(self.base(x, norm=norm))
        return y if onto is None else onto + y


def sum_results(stack: BlockStack, add: Callable[[mx.array], mx.array]) -> None:
    """Sum the results of attention and feed-forward layers by `add`, if not done before."""
    for block in stack.blocks:
        mixer, mlp = getattr(block, "mixer"), getattr(block, "mlp")  # noqa: B009  # blocks of `FAMILIES` have both
        for part, name in ((mixer, "output"), (mlp, "down")):
            if not isinstance(getattr(part, name), SummedLinear):
                setattr(part, name, SummedLinear(getattr(part, name), add))
    stack.runs = [Run(stack.blocks)]


def _columns(name: str, matrix: Matrix, first: int, count: int) -> Matrix:
    if isinstance(matrix, Dense):
        return Dense(_copied(matrix.weight, slice(first, first + count), -1))
    if not isinstance(matrix, Quantized):
        raise UnsupportedModelError("GGUF files cannot be divided by columns: leave out --split tensor, or convert the model")
    form = matrix.format
    if form.mode == FLOAT8 and form.group_size == matrix.shape[-1] and count % 32 == 0:  # a scale per whole row
        codes = _copied(matrix.weight, slice(first // 4, (first + count) // 4), -1)
        return replace(matrix, weight=codes, format=replace(form, group_size=count))
    if count % form.group_size or count * form.bits % 32:
        raise UnsupportedModelError(f"{name}: {count} columns are no whole groups of {form.group_size}: leave out --split tensor")

    def cut(array: mx.array, per: int) -> mx.array:
        return _copied(array, slice(first // per, (first + count) // per), -1)

    biases = None if matrix.biases is None else cut(matrix.biases, form.group_size)
    codes = _copied(matrix.weight, slice(first * form.bits // 32, (first + count) * form.bits // 32), -1)
    return replace(matrix, weight=codes, scales=cut(matrix.scales, form.group_size), biases=biases)


def _copied(array: mx.array, part: slice, axis: int) -> mx.array:
    """Return a copy of part of an array, because a view would keep the whole array alive."""
    where = (part, slice(None)) if axis == -2 else (..., part)
    view = array[where]
    return mx.slice_update(mx.zeros(view.shape, view.dtype), view, mx.array([0]), axes=(0,))
