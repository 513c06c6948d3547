"""Products of few rows with quantized matrices on an Apple GPU: by this project's kernels, where a trial on this machine speaks for them.

MLX reads an affine matrix once per row, or once per five rows; the kernels read it once per sixteen, and for up to eight rows compute the
gated unit that follows as well. A format is tried when the first matrix of it is loaded: every variant on a small case, and its speed,
which is remembered on disk. What is not chosen is multiplied by MLX.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import one_line
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from .activations import Activated
from .kernel_trial import TRIALS, kernels_in_use
from .mixed_scales import is_mixed, narrowed, restored
from .product_speeds import remember, remembered
from .weights import Blocks, Format, Quantized

if TYPE_CHECKING:
    from ..kernels_metal.quantized_matmul.trial import Speed, Subject

_MOST_ROWS = 16
"""Rows up to which a product reads a matrix in MLX's form once."""
_MOST_GATED_ROWS = 8
"""The same for gated products."""
_MOST_BLOCK_ROWS = 48
"""Rows up to which reading blocks once per 16 rows costs less than unpacking them into memory and back."""
UNPACKED_BYTES = 64 << 20
"""Bytes of a matrix that are unpacked at a time, for products of many rows."""
_SECONDS = 0.2
"""How long the speed of a format is measured, once on a machine."""
_USUAL, _LONG_SECONDS = Format(4, 64), 2.0
"""What `mlxinfer doctor` measures, and for how long: some kernels slow down only after a while."""
_KNOWN_PRODUCTS = 64
"""Shapes of rows for which a matrix keeps how they are multiplied."""
_WORTH = 0.8
"""Blocks stay blocks if one row is not slower than this against the larger affine codes, which also lose a little."""


Product = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Choice:
    """How products in one format and dtype are computed."""

    variants: frozenset[int] = frozenset()
    """The variants that are used, as in `launcher.ROWS`."""
    instead: str = ""
    """Why MLX's products are used for all numbers of rows."""
    failed: bool = False
    """Whether that is because a kernel did not work."""
    speeds: dict[int, Speed] = field(default_factory=dict)
    """The speed of each variant that was measured."""


_lock = threading.Lock()
_choices: dict[tuple[Format, mx.Dtype, str], Choice] = {}
"""By format, dtype, and the activation of gated products, "" for others."""
_age = 0
"""Changes with `_choices`."""


def quantized_product(x: mx.array, matrix: Quantized) -> mx.array:
    """x `[..., in]` times a matrix `[..., out, in]`, transposed, in the dtype of x. How that is done is worked out once per matrix, and
    anew after a trial."""
    known, key = matrix.products, (x.shape, x.dtype, _age)
    product = known.get(key)
    if product is None:
        if len(known) >= _KNOWN_PRODUCTS:
            known.clear()
        product = known[key] = _product(x, matrix)
    return product(x)


def gated_product(x: mx.array, matrix: Quantized, gate: Activated) -> mx.array:
    """`gate(first half, second half)` of `quantized_product`, `[..., out / 2]`: by one kernel, where its trial speaks for it."""
    known, key = matrix.products, (x.shape, x.dtype, _age, gate.activation)
    product = known.get(key)
    if product is None:
        if len(known) >= _KNOWN_PRODUCTS:
            known.clear()
        product = known[key] = _gated(x, matrix, gate)
    return product(x)


def _gated(x: mx.array, matrix: Quantized, gate: Activated) -> Product:
    kernel = None if is_mixed(x, matrix) else _kernel_product(x, matrix, gate.activation)
    if kernel is not None:
        return kernel
    product, compute = _product(x, matrix), gate.compute
    return lambda x: compute(*halves(product(x)))


def halves(y: mx.array) -> list[mx.array]:
    """`[..., n]` in the middle of its last axis."""
    if y.ndim == 2 and y.shape[0] == 1:
        # A half of one row keeps the distance of whole rows as its stride, because of which MLX's Metal products would copy what follows.
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
    """The product by our kernel, with an activation and a gate if one is named; None where MLX's own is used."""
    choice = _choices.get((matrix.format, x.dtype, gate)) if _choices else None
    if not choice or not choice.variants or matrix.weight.ndim != 2 or not is_gpu():
        return None
    rows = x.size // x.shape[-1]
    few, most = (1, _MOST_GATED_ROWS) if gate else (2, _MOST_ROWS)
    if not few <= rows <= most or (matrix.biases is not None and matrix.scales.dtype != x.dtype):
        return None
    from ..kernels_metal.quantized_matmul.launcher import launch_of, parts_of, rows_of_variant

    if rows_of_variant(rows) not in choice.variants:
        return None
    f, arrays = matrix.format, (matrix.weight, matrix.scales, matrix.biases)
    launch, parts = launch_of(x.reshape(rows, -1), *arrays, bits=f.bits, group_size=f.group_size, mode=f.mode, gate=gate), parts_of(*arrays)
    if parts[1] is not matrix.scales:
        mx.eval(parts)  # made here and kept, maybe for another thread
    if x.ndim == 2:
        return lambda x: launch.run([x, *parts])[0]
    return lambda x: launch.run([x.reshape(rows, -1), *parts])[0].reshape(*x.shape[:-1], -1)


def block_product(x: mx.array, matrix: Blocks) -> mx.array:
    """x `[..., in]` times a matrix `[out, in]`, transposed. For many rows, or where the kernels are not used, the matrix is unpacked in
    slices."""
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
    """Whether a kernel multiplies blocks of this type in this dtype."""
    return bool(_variants(form, dtype)) and is_gpu()


def block_rows(rows: mx.array, form: Format, dtype: mx.Dtype) -> mx.array:
    """Rows of blocks, `[..., bytes of a row]`, as numbers `[..., columns]`."""
    matrix = Blocks(rows, form)
    if not multiplies_blocks(form, dtype):
        return matrix.dequantize(dtype)
    from ..kernels_metal.quantized_matmul.launcher import block_dequantize

    return block_dequantize(rows.reshape(-1, rows.shape[-1]), form.mode, dtype).reshape(matrix.shape)


def block_kinds(dtype: mx.Dtype, kinds: Iterable[str], measured: Path | None = None) -> frozenset[str]:
    """Which of these GGUF types this machine multiplies in their blocks, in this dtype. Types that were not tried before are tried now;
    `measured` is the file that remembers speeds."""
    if not in_use():
        return frozenset()
    from ..kernels_metal.quantized_matmul.block_formats import BLOCKS

    forms = {kind: Format(BLOCKS[kind].bits, BLOCKS[kind].group, kind) for kind in kinds if kind in BLOCKS}
    for form in forms.values():
        try_format(form, dtype, measured)
    return frozenset(kind for kind, form in forms.items() if _variants(form, dtype))


def in_use() -> bool:
    """Whether MLX computes on an Apple GPU (tests: the emulator), and the kernels are not switched off."""
    return kernels_in_use() and not mx.cuda.is_available()


def try_format(
    form: Format, dtype: mx.Dtype, measured: Path | None = None, *, gate: str = "", seconds: float = _SECONDS, again: bool = False
) -> Choice | None:
    """Decide how products in this format and dtype are computed, those with this gate or, by default, those without, unless that is
    decided, or `again` asks for a new measurement. None where there are no kernels."""
    if not in_use():
        return None
    global _age
    with _lock:
        key = form, dtype, gate
        if again or key not in _choices:
            _choices[key] = _choice(_subject(*key), measured, seconds, again)
            _age += 1
        return _choices[key]


def _choice(subject: Subject, measured: Path | None, seconds: float, again: bool) -> Choice:
    from ..kernels_metal.quantized_matmul.block_formats import BLOCKS
    from ..kernels_metal.quantized_matmul.trial import is_supported, speeds, why_untrusted

    if not is_supported(subject):
        return Choice(instead="there is no kernel for them")
    if problem := why_untrusted(subject):
        return Choice(instead=problem, failed=True)
    found = None if again else remembered(measured, subject)
    if found is None:
        found = speeds(subject, seconds)
        remember(measured, subject, found)
    if subject.mode in BLOCKS:
        fast = found if not found[1].stalled and found[1].times_mlx >= _WORTH else {}
    else:
        fast = {rows: speed for rows, speed in found.items() if not speed.stalled and speed.times_mlx > 1}
    stalled = any(speed.stalled for speed in found.values())
    instead = "" if fast else "the kernel became slower while it ran" if stalled else "MLX's products are faster"
    return Choice(frozenset(fast), instead, stalled and not fast, found)


def _subject(form: Format, dtype: mx.Dtype, gate: str) -> Subject:
    from ..kernels_metal.quantized_matmul.trial import Subject

    return Subject(form.mode, form.bits, form.group_size, dtype, gate)


def _variants(form: Format, dtype: mx.Dtype) -> frozenset[int]:
    choice = _choices.get((form, dtype, ""))
    return choice.variants if choice else frozenset()


def product_status(dtype: mx.Dtype, measured: Path | None) -> list[str]:
    """How products in the usual format are computed on this machine, measured for longer than at load, and in formats that were tried;
    empty where there is no GPU."""
    try_format(_USUAL, dtype, measured, seconds=_LONG_SECONDS, again=True)
    return [f"products of few rows, {line}" for line in product_lines()]


def product_lines() -> list[str]:
    """How each format that was tried is multiplied, for people."""
    with _lock:
        return sorted(f"{_name(*key)}: {_described(choice)}" for key, choice in _choices.items())


def _name(form: Format, dtype: mx.Dtype, gate: str) -> str:
    kind = form.mode if form.mode not in ("affine", "mxfp4") else f"{form.bits}-bit {form.mode} in groups of {form.group_size}"
    return f"{kind}, {str(dtype).rpartition('.')[2]}" + (f", gated by {gate}" if gate else "")


def _described(choice: Choice) -> str:
    if choice.instead:
        return f"MLX's products, as {choice.instead}"
    speeds = ", ".join(f"{choice.speeds[rows].times_mlx:.2g}x at {rows}" for rows in sorted(choice.variants) if rows in choice.speeds)
    return f"this project's kernels; next to MLX's products {speeds} rows"


class _Products:
    """`Trial` of all formats."""

    @property
    def age(self) -> int:
        return _age

    def give_up(self, error: BaseException, *, guilty: bool) -> bool:
        from ..kernels_metal.quantized_matmul.trial import why_untrusted

        global _age
        with _lock:
            used = [key for key, choice in _choices.items() if choice.variants]
            used = [key for key in used if why_untrusted(_subject(*key))] if guilty else used
            _choices.update((key, Choice(instead=f"a Metal kernel failed: {one_line(error)}", failed=True)) for key in used)
            _age += 1
        return bool(used)

    def lost(self) -> list[str]:
        """Formats whose kernels do not work; slow ones are no loss."""
        with _lock:
            return sorted(f"products of few rows, {_name(*key)}: {_described(c)}" for key, c in _choices.items() if c.failed)


TRIAL = _Products()
TRIALS.append(TRIAL)
