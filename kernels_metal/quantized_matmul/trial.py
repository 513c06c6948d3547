"""Trial of the product kernels on this machine: results compared with MLX's, and speed, also over time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from ..kernel_speed import Clock, compare
from ..kernel_trial import Speed, difference
from . import reference
from .block_formats import BLOCKS
from .launcher import GATED_ROWS, GATES, ROW_WIDTHS, ROWS, block_dequantize, block_matmul, quantized_matmul, why_unsupported

Product = Callable[[mx.array, int], mx.array]
"""Multiplies x by the matrix with this number."""

_N, _K = 40, 768
"""N and K of the small case: a tile that is not full, and three steps of 256 numbers."""
_ONE_ROW_N, _ONE_ROW_K = 42, (640, 8832)
"""The same for one row: a block of rows that is not full; K for one simdgroup, and for eight of which the first has two runs a lane."""
_MOST_ERROR, _MEAN_ERROR = 0.02, 0.005
"""Bounds of `difference`."""
WIDTH, _BYTES = 4096, 64 << 20
"""Width of the timed matrices, and their total bytes: more than a cache stores."""
_AFFINE_BITS = {4: 4, 5: 5, 6: 8, 8: 8}
"""Bits of the affine codes that replace a GGUF type without its kernel."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A format of matrices, and the dtype of the product."""

    mode: str
    """"affine", "mxfp4", or the name of a GGUF type."""
    bits: int
    group_size: int
    """Numbers that share a scale."""
    dtype: mx.Dtype
    """The dtype of x, of the result, and of affine scales."""
    gate: str = ""
    """Activation of a gated product, one of the launcher's `GATES`; otherwise ""."""
    shape: str = ""
    """For products of one row in a format of MLX: a class of shapes, one of the launcher's `ROW_WIDTHS`; otherwise ""."""

    @property
    def name(self) -> str:
        form = self.mode if self.mode in BLOCKS else f"{self.mode} {self.bits}/{self.group_size}"
        return " ".join(part for part in (form, str(self.dtype).rpartition(".")[2], self.gate, self.shape) if part)

    @property
    def rows(self) -> tuple[int, ...]:
        """Variants to try. In formats of MLX, one row has a kernel of its own, which is tried for each class of shapes."""
        if self.mode in BLOCKS:
            return ROWS
        return ROWS[:1] if self.shape else GATED_ROWS[1:] if self.gate else ROWS[1:]

    @property
    def width(self) -> int:
        """Columns of the timed matrices, and results of their products, since each is the input of the next."""
        return ROW_WIDTHS.get(self.shape, WIDTH)

    @property
    def sides(self) -> int:
        """Matrix rows per output column: 2 for gated products, otherwise 1."""
        return 2 if self.gate else 1

    def nbytes(self, numbers: int) -> int:
        """Return the bytes of a matrix of `numbers` numbers, with its scales."""
        if self.mode in BLOCKS:
            return numbers // BLOCKS[self.mode].numbers * BLOCKS[self.mode].bytes
        return numbers * self.bits // 8 + numbers // self.group_size * (1 if self.mode == "mxfp4" else 2 * self.dtype.size)


def is_supported(subject: Subject) -> bool:
    """True if kernels exist for this format."""
    scales = mx.uint8 if subject.mode == "mxfp4" else subject.dtype
    if subject.gate and (subject.mode in BLOCKS or subject.gate not in GATES):
        return False
    return subject.mode in BLOCKS or not why_unsupported(subject.dtype, subject.bits, subject.group_size, subject.mode, scales)


def wrong_products(subject: Subject) -> str | None:
    """Compute a small case with each variant. Return the fault, or None. Raises RuntimeError or ValueError if a kernel cannot run."""
    if subject.mode in BLOCKS:
        weight = _blocks(subject, _N, _K)
        rounded = reference.dequantized(weight, subject.mode, subject.dtype)
        if not mx.array_equal(block_dequantize(weight, subject.mode, subject.dtype), rounded).item():
            return "unpacked numbers differ from plain MLX"
        numbers = reference.dequantized(weight, subject.mode, mx.float32)
        return _wrong_rows(subject, numbers, lambda x: block_matmul(x, weight, subject.mode))
    sizes = [(_ONE_ROW_N, k) for k in _ONE_ROW_K] if subject.shape else [(_N, _K)]
    return next((fault for n, k in sizes if (fault := _wrong_codes(subject, n, k))), None)


def _wrong_codes(subject: Subject, n: int, k: int) -> str | None:
    bits, group, mode = subject.bits, subject.group_size, subject.mode
    words, scales, biases = _codes(bits, group, mode, subject.dtype, n, k)
    if biases is None:
        numbers = mx.dequantize(words, scales, None, group, bits, mode).astype(mx.float32)
    else:
        numbers = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group, bits)
    product = partial(quantized_matmul, bits=bits, group_size=group, mode=mode, gate=subject.gate)
    return _wrong_rows(subject, numbers, lambda x: product(x, words, scales, biases))


def _wrong_rows(subject: Subject, numbers: mx.array, product: Callable[[mx.array], mx.array]) -> str | None:
    """Compare each variant's product with one in float32."""
    for rows in subject.rows:
        x = mx.random.normal((rows, numbers.shape[1]), key=mx.random.key(rows)).astype(subject.dtype)
        expected = x.astype(mx.float32) @ numbers.T
        if subject.gate:
            gate, up = mx.split(expected, 2, axis=-1)
            expected = reference.gated(gate, up, subject.gate)
        if error := difference(product(x), expected, _MOST_ERROR, _MEAN_ERROR):
            return f"products of {rows} rows {error}"
    return None


def speeds(
    subject: Subject, seconds: float, *, clock: Clock = time.perf_counter, width: int | None = None, most_bytes: int = _BYTES
) -> dict[int, Speed]:
    """Measure the speed of each variant compared with MLX's product of as many rows, for about `seconds` in total. Matrices have the
    width of the subject, or `width`.

    Products follow one another through several matrices, as in a model, more than a cache stores. GGUF types are compared with the affine
    codes that would replace them.
    """
    width = width or subject.width
    count = max(most_bytes * 8 // (width * width * subject.sides * subject.bits), 1)
    ours, theirs = _products(subject, count, width, width)
    share = seconds / len(subject.rows)
    return {
        rows: compare(ours, theirs, mx.ones((rows, width), subject.dtype), steps=count, seconds=share, clock=clock) for rows in subject.rows
    }


def _products(subject: Subject, count: int, n: int, k: int) -> tuple[Product, Product]:
    """Return our product and MLX's, of `count` random matrices `[n, k]`; gated ones have twice the rows."""
    if subject.mode in BLOCKS:
        blocks = [_blocks(subject, n, k) for _ in range(count)]
        affine = Subject("affine", _AFFINE_BITS[subject.bits], 32, subject.dtype)
        mx.eval(blocks)
        return lambda x, number: block_matmul(x, blocks[number], subject.mode), _products(affine, count, n, k)[1]
    bits, group, mode = subject.bits, subject.group_size, subject.mode
    codes = [_codes(bits, group, mode, subject.dtype, subject.sides * n, k) for _ in range(count)]
    mx.eval(codes)
    gate = _gate(subject.gate)
    return (
        lambda x, number: quantized_matmul(x, *codes[number], bits=bits, group_size=group, mode=mode, gate=subject.gate),
        lambda x, number: gate(mx.quantized_matmul(x, *codes[number], transpose=True, group_size=group, bits=bits, mode=mode)),
    )


def _gate(gate: str) -> Callable[[mx.array], mx.array]:
    """Return the operation after MLX's product in a model: a gate of both halves, or nothing."""
    if not gate:
        return lambda y: y
    one = partial(reference.gated, gate=gate)
    gated = mx.compile(one, shapeless=True) if mx.default_device() == mx.gpu else one
    return lambda y: gated(*mx.split(y.reshape(2, -1), 2)) if len(y) == 1 else gated(*mx.split(y, 2, axis=-1))


def _codes(bits: int, group: int, mode: str, dtype: mx.Dtype, n: int, k: int) -> tuple[mx.array, mx.array, mx.array | None]:
    words = _random_words((n, k * bits // 32))
    if mode == "mxfp4":
        return words, mx.full((n, k // group), 121, mx.uint8), None
    scales = mx.full((n, k // group), 2.0**-bits / 16, dtype)
    return words, scales, mx.full((n, k // group), -1 / 32, dtype)


def _blocks(subject: Subject, n: int, k: int) -> mx.array:
    form = BLOCKS[subject.mode]
    count = n * k // form.numbers * form.bytes
    weight = _random_words((count // 4 + 1,)).view(mx.uint8)[:count].reshape(n, k // form.numbers, form.bytes)
    for at in form.halves:
        weight[..., at], weight[..., at + 1] = 0, 0x10  # 2^-11
    return weight.reshape(n, -1)


def _random_words(shape: tuple[int, ...]) -> mx.array:
    return mx.random.randint(-(2**31), 2**31 - 1, shape, mx.int32).view(mx.uint32)
