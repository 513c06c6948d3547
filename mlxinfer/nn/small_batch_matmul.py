"""Products of few rows with quantized matrices on an Apple GPU: this project's kernels, if a trial on this machine favours them.

MLX reads an affine matrix once per row, or once per five rows. The kernels read it once per sixteen rows, and for up to eight rows also
compute the gated unit that follows. A format is tried when its first matrix is loaded: every variant on a small case, then its speed, which
is remembered on disk. The kernel of one row is tried for each class of shapes. MLX multiplies all other products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..kernels_metal.kernel_trial import KernelTrial, Kind, Speed, Speeds, Verdict, faster_variants, kernels_in_use
from ..util.device import is_gpu
from .activations import Activated
from .mixed_scales import is_mixed, narrowed, restored
from .weights import Blocks, Format, Quantized

if TYPE_CHECKING:
    from ..kernels_metal.quantized_matmul.trial import Subject

_MOST_ROWS = 16
"""Maximum rows for which a product in MLX's formats reads the matrix once."""
_MOST_GATED_ROWS = 8
"""The same for gated products."""
_LEAST_NUMBERS = 1 << 21
"""Least numbers of a matrix whose product with one row may use our kernel. A launch of ours costs the host microseconds more, and models of
smaller matrices wait for the host."""
_MOST_BLOCK_ROWS = 48
"""Maximum rows for which reading blocks once per 16 rows is cheaper than unpacking them to memory."""
UNPACKED_BYTES = 64 << 20
"""Bytes of a matrix that are unpacked at a time, for products of many rows."""
_SECONDS, _ROW_SECONDS = 0.2, 0.1
"""Duration of the measurement of a format, and of one row and a class of shapes, once per machine."""
_USUAL, _USUAL_SHAPE, _LONG_SECONDS = Format(4, 64), "wide", 2.0
"""Format that `mlxinfer doctor` measures, the class of shapes for one row, and the duration: some kernels slow down only after a while."""
_KNOWN_PRODUCTS = 64
"""Shapes of rows for which a matrix caches its product."""
_WORTH = 0.8
"""Minimum speed of one row for keeping blocks, compared with the larger affine codes, which also lose a little."""


Product = Callable[[mx.array], mx.array]


def quantized_product(x: mx.array, matrix: Quantized) -> mx.array:
    """Multiply x `[..., in]` by a matrix `[..., out, in]`, transposed, in the dtype of x. The choice of a kernel is cached per matrix until
    the next trial."""
    known, key = matrix.products, (x.shape, x.dtype, TRIAL.age)
    product = known.get(key)
    if product is None:
        if len(known) >= _KNOWN_PRODUCTS:
            known.clear()
        product = known[key] = _product(x, matrix)
    return product(x)


def gated_product(x: mx.array, matrix: Quantized, gate: Activated) -> mx.array:
    """Return `gate(first half, second half)` of `quantized_product`, `[..., out / 2]`: by one kernel if its trial favours it."""
    known, key = matrix.products, (x.shape, x.dtype, TRIAL.age, gate.activation)
    product = known.get(key)
    if product is None:
        if len(known) >= _KNOWN_PRODUCTS:
            known.clear()
        product = known[key] = _gated_product(x, matrix, gate)
    return product(x)


def _gated_product(x: mx.array, matrix: Quantized, gate: Activated) -> Product:
    kernel = None if is_mixed(x, matrix) else _kernel_product(x, matrix, gate.activation)
    if kernel is not None:
        return kernel
    product, compute = _product(x, matrix), gate.compute
    return lambda x: compute(*halves(product(x)))


def halves(y: mx.array) -> list[mx.array]:
    """Split `[..., n]` in the middle of its last axis."""
    if y.ndim == 2 and y.shape[0] == 1:
        # Half of one row would keep the stride of whole rows, and MLX's Metal products would copy it.
        return [*mx.split(y.reshape(2, -1), 2)]
    return [*mx.split(y, 2, axis=-1)]


def _product(x: mx.array, matrix: Quantized) -> Product:
    if is_mixed(x, matrix):
        product = _product(narrowed(x), matrix)
        return lambda x: restored(product(narrowed(x)))
    kernel = _kernel_product(x, matrix)
    if kernel is not None:
        return kernel
    weight, scales, biases, f = matrix.weight, matrix.scales, matrix.biases, matrix.format
    return lambda x: mx.quantized_matmul(x, weight, scales, biases, True, f.group_size, f.bits, f.mode)


def _kernel_product(x: mx.array, matrix: Quantized, gate: str = "") -> Product | None:
    """Return the product by our kernel, gated by the activation `gate` if it is not empty; None if MLX's product is used."""
    if matrix.weight.ndim != 2 or not is_gpu():
        return None
    rows, most = x.size // x.shape[-1], _MOST_GATED_ROWS if gate else _MOST_ROWS
    shape = row_shape(matrix, gate) if rows == 1 else ""
    fast = _fast_variants(matrix.format, x.dtype, gate, shape)
    if not fast or not (2 <= rows <= most or shape) or (matrix.biases is not None and matrix.scales.dtype != x.dtype):
        return None
    from ..kernels_metal.quantized_matmul.launcher import launch_of, parts_of, rows_of_variant

    if rows_of_variant(rows) not in fast:
        return None
    f, arrays = matrix.format, (matrix.weight, matrix.scales, matrix.biases)
    launch, parts = launch_of(x.reshape(rows, -1), *arrays, bits=f.bits, group_size=f.group_size, mode=f.mode, gate=gate), parts_of(*arrays)
    if parts[1] is not matrix.scales:
        mx.eval(parts)  # cached, and possibly used by another thread
    if x.ndim == 2:
        return lambda x: launch.run([x, *parts])[0]
    return lambda x: launch.run([x.reshape(rows, -1), *parts])[0].reshape(*x.shape[:-1], -1)


def row_shape(matrix: Quantized, gate: str = "") -> str:
    """Return the class of shapes in which the product of this matrix and one row is tried; "" if MLX computes it in any case."""
    from ..kernels_metal.quantized_matmul.launcher import row_class

    n, k = matrix.shape
    return row_class(n, k, gated=bool(gate)) if gate or n * k >= _LEAST_NUMBERS else ""


def block_product(x: mx.array, matrix: Blocks) -> mx.array:
    """Multiply x `[..., in]` by a matrix `[out, in]`, transposed. For many rows, or without kernels, the matrix is unpacked in slices."""
    rows, weight, form = x.size // x.shape[-1], matrix.weight, matrix.format
    flat = x.reshape(rows, -1)
    if rows <= _MOST_BLOCK_ROWS and multiplies_blocks(form, x.dtype):
        from ..kernels_metal.quantized_matmul.launcher import block_matmul

        y = block_matmul(flat, weight, form.mode)
    else:
        step = max(UNPACKED_BYTES // (x.shape[-1] * x.dtype.size) // 16 * 16, 16)
        slices = [weight[at : at + step] for at in range(0, weight.shape[0], step)]
        y = mx.concatenate([flat @ block_rows(piece, form, x.dtype).T for piece in slices], axis=-1)
    return y.reshape(*x.shape[:-1], -1)


def multiplies_blocks(form: Format, dtype: mx.Dtype) -> bool:
    """True if a kernel multiplies blocks of this type in this dtype."""
    return bool(_fast_variants(form, dtype)) and is_gpu()


def block_rows(rows: mx.array, form: Format, dtype: mx.Dtype) -> mx.array:
    """Unpack rows of blocks `[..., bytes of a row]` to numbers `[..., columns]`."""
    matrix = Blocks(rows, form)
    if not multiplies_blocks(form, dtype):
        return matrix.dequantize(dtype)
    from ..kernels_metal.quantized_matmul.launcher import block_dequantize

    return block_dequantize(rows.reshape(-1, rows.shape[-1]), form.mode, dtype).reshape(matrix.shape)


def block_kinds(dtype: mx.Dtype, kinds: Iterable[str]) -> frozenset[str]:
    """Return the GGUF types, of `kinds`, that this machine multiplies in their blocks in this dtype. Untried types are tried now."""
    if not in_use():
        return frozenset()
    from ..kernels_metal.quantized_matmul.block_formats import BLOCKS

    forms = {kind: Format(BLOCKS[kind].bits, BLOCKS[kind].group, kind) for kind in kinds if kind in BLOCKS}
    for form in forms.values():
        try_format(form, dtype)
    return frozenset(kind for kind, form in forms.items() if _fast_variants(form, dtype))


def in_use() -> bool:
    """True if MLX computes on an Apple GPU (tests: the emulator) and the kernels are not switched off."""
    return kernels_in_use() and not mx.cuda.is_available()


def try_format(
    form: Format, dtype: mx.Dtype, *, gate: str = "", shape: str = "", seconds: float = 0.0, again: bool = False
) -> Verdict | None:
    """Return how products in this format and dtype are computed: those with this gate, by default those without one.

    With a `shape` of `row_shape`, it is about one row and matrices of this class; otherwise about several rows. A kind is tried and
    measured once, or `again` on request, for `seconds` if given. None if this device does not run the kernels.
    """
    if not in_use():
        return None
    from ..kernels_metal.quantized_matmul.trial import is_supported

    kind, seconds = kind_of(form, dtype, gate, shape), seconds or (_ROW_SECONDS if shape else _SECONDS)
    if not is_supported(_subject(*kind)):
        return TRIAL.verdicts.setdefault(kind, Verdict("there is no kernel for them", quiet=True))
    return TRIAL.try_now(*kind, again=again, speeds=partial(_speeds, seconds=seconds))


def kind_of(form: Format, dtype: mx.Dtype, gate: str, shape: str) -> Kind:
    """Return the kind of `TRIAL`: of one row if there is a `shape` of `row_shape`, otherwise of several."""
    return (form, dtype, gate, shape) if shape else (form, dtype, gate)


def _speeds(*kind: Any, seconds: float) -> Speeds:
    from ..kernels_metal.quantized_matmul.trial import speeds

    return speeds(_subject(*kind), seconds)


def _chosen(kind: Kind, speeds: Speeds, used: Collection[int]) -> Verdict:
    """Choose the variants that are faster. Blocks are multiplied by all variants or by none, since MLX needs other codes."""
    from ..kernels_metal.quantized_matmul.block_formats import BLOCKS

    if kind[0].mode not in BLOCKS or 1 not in speeds:
        return faster_variants(kind, speeds, used)
    one = faster_variants(kind, {1: speeds[1]}, used, least=_WORTH)
    return one if one.obstacle else Verdict(speeds=speeds)


def _subject(form: Format, dtype: mx.Dtype, gate: str, shape: str = "") -> Subject:
    from ..kernels_metal.quantized_matmul.trial import Subject

    return Subject(form.mode, form.bits, form.group_size, dtype, gate, shape)


def _fast_variants(form: Format, dtype: mx.Dtype, gate: str = "", shape: str = "") -> Mapping[int, Speed]:
    """The variants that are used, by rows, with their speeds."""
    verdict = TRIAL.verdicts.get(kind_of(form, dtype, gate, shape))
    return verdict.speeds if verdict else {}


def _check(*kind: Any) -> str | None:
    from ..kernels_metal.quantized_matmul.trial import wrong_products

    return wrong_products(_subject(*kind))


def _describe(kind: Kind, verdict: Verdict) -> str:
    form, dtype, gate, *shape = kind
    name = form.mode if form.mode not in ("affine", "mxfp4") else f"{form.bits}-bit {form.mode} in groups of {form.group_size}"
    name = f", {name}, {str(dtype).rpartition('.')[2]}" + (f", gated by {gate}" if gate else "")
    name += f", {shape[0]} matrices" if shape else ""
    if verdict.obstacle:
        return f"{name}: MLX's products, as {verdict.obstacle}"
    speeds = ", ".join(f"{speed.times_mlx:.2g}x at {rows}" for rows, speed in sorted(verdict.speeds.items()))
    return f"{name}: this project's kernels; next to MLX's products {speeds} row{'' if shape else 's'}"


TRIAL = KernelTrial("products of few rows", _check, choose=_chosen, describe=_describe)
"""By format, dtype, and the activation of gated products, "" for others; those of one row also by their class of shapes."""


def product_status(dtype: mx.Dtype) -> list[str]:
    """Describe products in all formats that were tried, and in the usual one, which is measured for longer than at load; empty without
    a GPU."""
    for shape in ("", _USUAL_SHAPE):
        try_format(_USUAL, dtype, shape=shape, seconds=_LONG_SECONDS, again=True)
    return TRIAL.described()
