"""How fast this machine does what a conversion is made of: each measured on a small piece, in about a tenth of a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ... import kernels_cpu
from ...evaluation.probabilities import kl_divergence, logprobs_of
from ...evaluation.reference_logprobs import Teacher
from ...nn.weights import Dense, Format
from ...util.device import default_dtype
from ..calibrate.products import add_gram
from ..encode.affine import Encoder
from ..encode.gptq import Factor, encode, factorize
from ..encode.quantizer import Quantizer
from .weight_map import Output

_SIDE = 1024
"""Rows and columns of the matrices that are measured."""

_ROWS, _VOCABULARY = 16, 32_768
"""Positions and tokens whose probabilities are measured."""
_BESIDES = 0.3
"""What is done to such a number, in gates with a sum of squares: measured, while SmolLM2 was read."""


def seconds_per_weight(output: Output, encoder: Encoder) -> float:
    """Seconds to round a weight to the format that this tensor will have."""
    assert isinstance(output.target, Format)
    form, sample = output.target, _random().astype(output.dtype)
    mx.eval(sample)
    if encoder == "gptq" and form.mode == "affine":
        factor = Factor(np.arange(_SIDE), np.eye(_SIDE, dtype=np.float32), mx.ones((_SIDE,)))
        return _seconds(lambda: mx.eval(encode(sample, form, factor))) / _SIDE**2
    quantizer = Quantizer(output, None if encoder == "minmax" else mx.ones((_SIDE,)))
    return _seconds(lambda: mx.eval(quantizer(Dense(sample)))) / _SIDE**2


def seconds_per_product(dtype: mx.Dtype | None = None) -> float:
    """Seconds to multiply a weight with a number while the model reads: by the kernels that compute it, in `dtype` or the usual one."""
    x, matrix = (_random().astype(dtype or default_dtype()) for _ in range(2))
    mx.eval(x, matrix)
    if not kernels_cpu.in_use():
        return _seconds(lambda: mx.eval(x @ matrix.T)) / _SIDE**3
    packed = kernels_cpu.pack(matrix)
    return _seconds(lambda: mx.eval(packed.multiply(x))) / _SIDE**3


def seconds_per_channel() -> float:
    """Seconds for what a model does besides products while it reads (attention, norms, gates, the sums of squares), for each number that
    goes into a product or comes out of it."""
    x = _random()
    mx.eval(x)
    return _BESIDES * _seconds(lambda: mx.eval(x * mx.sigmoid(x), mx.square(x).sum(0))) / _SIDE**2


def seconds_per_probability() -> float:
    """Seconds for the probability of one token at one position, while two models are compared: for one of the two."""
    logits = mx.random.normal((_ROWS, _VOCABULARY), key=mx.random.key(0))
    nothing = np.zeros(_ROWS)
    teacher = Teacher(_ROWS, _VOCABULARY, None, {})

    def compare() -> None:
        for _ in range(2):
            found = logprobs_of(logits)
        teacher.write(0, 0, found, nothing)
        mx.eval(kl_divergence(teacher.read(0, _ROWS), found), mx.argmax(found, axis=-1))

    return _seconds(compare) / (2 * _ROWS * _VOCABULARY)


def seconds_per_sum() -> float:
    """Seconds to add a product of two inputs to a sum of `x x^T`."""
    sums, x = np.zeros((_SIDE, _SIDE), np.float32), _random()
    mx.eval(x)
    return _seconds(lambda: add_gram(sums, x)) / _SIDE**3


def seconds_per_cube() -> float:
    """Seconds to factor a sum of `x x^T`, for the cube of its columns."""
    sums = np.eye(_SIDE, dtype=np.float32)
    return _seconds(lambda: factorize(sums, "a sample")) / _SIDE**3


def _random() -> mx.array:
    return mx.random.normal((_SIDE, _SIDE), key=mx.random.key(0))


def _seconds(work: Callable[[], object]) -> float:
    """The shorter of two times: the first may compile something, or start threads."""
    found = []
    for _ in range(2):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)
