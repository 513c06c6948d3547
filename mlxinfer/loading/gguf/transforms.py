"""Undoes the edits of llama.cpp's converter. A tensor of another shape stays unchanged, for the loader to refuse.

Sources: `conversion/llama.py` (rotation), `gemma.py` (norms), `qwen.py` (gated delta nets) of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from ...nn.weights import Dense, Format, Matrix, Quantized, concat, map_rows, numbers
from ...util.dataclass import dataclass
from .base_config import Config
from .reader import TensorInfo
from .tensors import stored, widened

Operation = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of the model, made from tensors of the file."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of the result, unpacked."""
    stored: Format | mx.Dtype
    """Format or dtype of the result."""
    nbytes: int
    """Bytes of the sources in the file."""
    make: Callable[[list[Matrix]], Matrix]
    """Maps the sources' matrices, in order, to the result."""
    in_groups: bool = False
    """True if sources that would stay in blocks are packed instead."""


def unchanged(info: TensorInfo) -> MappedTensor:
    return MappedTensor((info.name,), info.shape, stored(info), info.nbytes, lambda matrices: matrices[0])


def rows(info: TensorInfo, operation: Operation) -> MappedTensor:
    """Reorder rows, or entries of a vector. Correct for packed matrices as well."""
    return MappedTensor((info.name,), info.shape, stored(info), info.nbytes, lambda matrices: map_rows(matrices[0], operation))


def values(info: TensorInfo, operation: Operation, shape: tuple[int, ...] | None = None) -> MappedTensor:
    """Compute on the numbers, in float32."""
    return MappedTensor(
        (info.name,),
        info.shape if shape is None else shape,
        mx.float32,
        info.nbytes,
        lambda matrices: Dense(operation(numbers(matrices[0]))),
    )


def joined_rows(infos: list[TensorInfo], operation: Operation) -> MappedTensor:
    """Stack several matrices by rows, then reorder. The result is packed if all have the same format, or differ in bits only."""
    forms = [stored(info) for info in infos]
    if len(set(forms)) > 1:
        infos = [replace(info, kept=None) if info.packed else info for info in infos]
        forms = [_widest_format([stored(info) for info in infos])] * len(infos)
    count, form = sum(info.shape[-2] for info in infos), forms[0]

    def make(matrices: list[Matrix]) -> Matrix:
        return map_rows(concat([_in_format(matrix, form) for matrix in matrices]), operation)

    nbytes = sum(info.nbytes for info in infos)
    return MappedTensor(
        tuple(info.name for info in infos), (count, infos[0].shape[-1]), form, nbytes, make, in_groups=not any(info.kept for info in infos)
    )


def _widest_format(forms: list[Format | mx.Dtype]) -> Format | mx.Dtype:
    """The format with the widest codes, if these formats differ only in bits; else float32."""
    found = [form for form in forms if isinstance(form, Format) and form.mode == "affine"]
    if len(found) < len(forms) or len({form.group_size for form in found}) > 1:
        return mx.float32
    return max(found, key=lambda form: form.bits)


def _in_format(matrix: Matrix, form: Format | mx.Dtype) -> Matrix:
    if not isinstance(form, Format):
        return matrix if isinstance(matrix, Dense) else Dense(numbers(matrix))
    return widened(matrix, form.bits) if isinstance(matrix, Quantized) and matrix.format != form else matrix


def columns(info: TensorInfo, operation: Operation, run: int) -> MappedTensor:
    """Reorder columns in whole runs of `run`. `operation` gets `[rows, columns / run, run]`, or the packed form of a run."""
    info = replace(info, kept=None) if info.packed else info
    form = stored(info)
    packed = isinstance(form, Format) and not info.kept and run % form.group_size == 0
    count = info.shape[-1] // run

    def reorder(array: mx.array) -> mx.array:
        return operation(array.reshape(*array.shape[:-1], count, -1)).reshape(array.shape)

    def make(matrices: list[Matrix]) -> Matrix:
        matrix = matrices[0]
        if isinstance(matrix, Dense):
            return Dense(reorder(matrix.weight))
        return matrix.each(reorder) if packed else Dense(reorder(numbers(matrix)))

    kept = form if packed or not isinstance(form, Format) else mx.float32
    return MappedTensor((info.name,), info.shape, kept, info.nbytes, make, in_groups=info.packed)


Transform = Callable[[TensorInfo, Config], MappedTensor]


def half_rotation(heads_key: str) -> Transform:
    """Reorder rows of each head from neighbouring pairs `(2i, 2i + 1)`, which Meta's code rotates, to pairs `(i, i + half)`."""

    def transform(info: TensorInfo, config: Config) -> MappedTensor:
        heads = config[heads_key]
        count = info.shape[0] if info.shape else 1
        if count % (2 * heads):
            return unchanged(info)
        return rows(info, _swapped_axes(0, heads, count // heads // 2, 2))

    return transform


def without_one(info: TensorInfo, config: Config) -> MappedTensor:
    """Gemma's norms multiply by weight + 1; llama.cpp stores the sum."""
    return values(info, lambda x: x - 1)


def decay(*, grouped: bool) -> Transform:
    """`A_log`, of which llama.cpp stores `-exp`."""

    def transform(info: TensorInfo, config: Config) -> MappedTensor:
        order = _value_heads(config, 0) if grouped and info.shape == (config["linear_num_value_heads"],) else _identity
        return values(info, lambda x: order(mx.log(-x)))

    return transform


def flat(inner: Transform = lambda info, config: values(info, _identity)) -> Transform:
    """Flatten a vector that the file stores with further axes."""

    def transform(info: TensorInfo, config: Config) -> MappedTensor:
        mapped = inner(info, config)
        return replace(
            mapped, shape=(math.prod(info.shape),), make=lambda matrices: map_rows(mapped.make(matrices), lambda x: x.reshape(-1))
        )

    return transform


def by_head(inner: Transform) -> Transform:
    """A number per head, as `[1, 1, heads, 1]`."""

    def transform(info: TensorInfo, config: Config) -> MappedTensor:
        mapped, shape = inner(info, config), (1, 1, math.prod(info.shape), 1)
        return replace(mapped, shape=shape, make=lambda matrices: map_rows(mapped.make(matrices), lambda x: x.reshape(shape)))

    return transform


def conv_kernel(*, grouped: bool) -> Transform:
    """Convert `[channels, width]`, perhaps with axes of 1, to the `[channels, width, 1]` of an MLX convolution."""

    def transform(info: TensorInfo, config: Config) -> MappedTensor:
        shape = info.shape if len(info.shape) == 2 else tuple(size for size in info.shape if size != 1)
        if len(shape) != 2:
            return unchanged(info)
        order = _value_part(info, config) if grouped else _identity
        return values(info, lambda x: order(x.reshape(shape))[..., None], (*shape, 1))

    return transform


def one_row(info: TensorInfo, config: Config) -> MappedTensor:
    """A matrix with one row, which some files store as a vector."""
    return values(info, lambda x: x.reshape(1, -1), (1, math.prod(info.shape)))


def grouped_rows(info: TensorInfo, config: Config) -> MappedTensor:
    """Reorder rows by value head: from the first head of every key head, then all second, to those of one key head together."""
    heads = config["linear_num_value_heads"]
    fits = info.shape and info.shape[0] % heads == 0
    return rows(info, _value_heads(config, 0)) if fits else unchanged(info)


def grouped_value_rows(info: TensorInfo, config: Config) -> MappedTensor:
    """As `grouped_rows`, for the rows below those of queries and keys."""
    return rows(info, _value_part(info, config))


def grouped_columns(info: TensorInfo, config: Config) -> MappedTensor:
    """As `grouped_rows`, for the inputs of a projection."""
    heads = config["linear_num_value_heads"]
    if len(info.shape) != 2 or info.shape[-1] % heads or heads == config["linear_num_key_heads"]:
        return unchanged(info)  # with one value head per key head nothing moves, and blocks stay as they are
    return columns(info, _value_heads(config, -2), info.shape[-1] // heads)


def interleaved_qkvz(qkv: TensorInfo, gate: TensorInfo, config: Config) -> MappedTensor:
    """Reorder rows from all queries, then all keys, values and gates, to groups by key head."""
    keys, per_key = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"] * per_key
    sizes = [key_dim, key_dim, value_dim, value_dim]
    alike = len(qkv.shape) == len(gate.shape) == 2 and qkv.shape[1] == gate.shape[1]
    if not alike or (qkv.shape[0], gate.shape[0]) != (keys * sum(sizes[:3]), keys * sizes[3]):
        return unchanged(qkv)
    cuts = [keys * sum(sizes[:part]) for part in (1, 2, 3)]

    def interleave(x: mx.array) -> mx.array:
        parts = [part.reshape(keys, -1, x.shape[-1]) for part in mx.split(x, cuts, axis=0)]
        return mx.concatenate(parts, axis=1).reshape(x.shape)

    return joined_rows([qkv, gate], interleave)


def piece(info: TensorInfo, start: int, stop: int, transform: Transform, config: Config) -> MappedTensor:
    """Rows `start .. stop` of a fused tensor, edited like a whole tensor."""
    vector = len(info.shape) == 1
    shape = (stop - start,) if vector else (*info.shape[:-2], stop - start, info.shape[-1])
    share = replace(info, shape=shape, nbytes=info.nbytes * math.prod(shape) // math.prod(info.shape))
    mapped = transform(share, config)

    def cut(x: mx.array) -> mx.array:
        return x[start:stop] if vector else x[..., start:stop, :]

    return replace(mapped, make=lambda matrices: mapped.make([map_rows(matrices[0], cut)]))


def every_second(info: TensorInfo, first: int) -> MappedTensor:
    """Take every second row of each expert's matrix, or entry of its bias, starting at `first`."""
    axis = len(info.shape) - (1 if len(info.shape) < 3 else 2)
    shape = tuple(size // 2 if at == axis else size for at, size in enumerate(info.shape))
    if len(info.shape) < 2 or info.shape[axis] % 2:
        return unchanged(info)

    def pick(x: mx.array) -> mx.array:
        return x[..., first::2] if x.ndim < 3 else x[..., first::2, :]

    share = replace(info, shape=shape, nbytes=info.nbytes // 2)
    return replace(unchanged(share), make=lambda matrices: map_rows(matrices[0], pick))


def scaled(mapped: MappedTensor, scale: TensorInfo) -> MappedTensor:
    """Multiply a weight by its scale, one number or one per expert."""

    def make(matrices: list[Matrix]) -> Matrix:
        factor = numbers(matrices[-1]).reshape(-1, *[1] * (len(mapped.shape) - 1))
        return Dense(numbers(mapped.make(matrices[:-1])) * factor)

    return MappedTensor((*mapped.sources, scale.name), mapped.shape, mx.float32, mapped.nbytes + scale.nbytes, make)


def _swapped_axes(axis: int, outer: int, first: int, second: int) -> Operation:
    """View an axis as `[outer, first, second, rest]` and swap the middle two."""

    def operation(x: mx.array) -> mx.array:
        at = axis % x.ndim
        split = x.reshape(*x.shape[:at], outer, first, second, -1, *x.shape[at + 1 :])
        return split.swapaxes(at + 1, at + 2).reshape(x.shape)

    return operation


def _value_heads(config: Config, axis: int) -> Operation:
    keys = config["linear_num_key_heads"]
    return _swapped_axes(axis, 1, config["linear_num_value_heads"] // keys, keys)


def _value_part(info: TensorInfo, config: Config) -> Operation:
    above = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if not info.shape or info.shape[0] - above != config["linear_num_value_heads"] * config["linear_value_head_dim"]:
        return _identity
    order = _value_heads(config, 0)
    return lambda x: mx.concatenate([x[:above], order(x[above:])], axis=0)


def _identity(x: mx.array) -> mx.array:
    return x
