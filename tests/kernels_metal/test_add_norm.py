"""A sum with a norm in one kernel, in the emulator, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.add_norm import reference
from mlxinfer.kernels_metal.add_norm.launcher import add_norm, inputs_of
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles.sealed_pages import to_float

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
EPS_AFTER, EPS_BEFORE = 1e-3, 1e-6
STEP = {F32: 1e-6, F16: 2.0**-9, BF16: 2.0**-6}
"""A few roundings of numbers below 4."""


class Scene:
    """Random rows, one of them zero and one large."""

    def __init__(
        self,
        rows: int,
        dim: int,
        dtype: mx.Dtype,
        *,
        after: bool,
        before: bool = True,
        scale: float = 1.0,
        gain: float = 1.0,
        biased: bool = False,
    ) -> None:
        random = np.random.default_rng(dim)
        result, stream = (random.normal(size=(rows, dim)).astype(np.float32) for _ in range(2))
        result[rows // 2], stream[rows // 2] = 0, 0
        stream[-1] *= 50
        self.result, self.stream = mx.array(result).astype(dtype), mx.array(stream).astype(dtype)
        weights = [mx.array((1 + 0.3 * random.normal(size=dim)).astype(np.float32)).astype(dtype) for _ in range(2)]
        self.after = (weights[0], EPS_AFTER) if after else None
        self.before = (weights[1], EPS_BEFORE) if before else None
        self.bias = mx.array(random.normal(size=dim).astype(np.float32)).astype(dtype) if biased else None
        self.factors = scale, gain

    def run(self) -> list[np.ndarray]:
        sums, normed = add_norm(self.result, self.stream, self.after, self.before, *self.factors, self.bias)
        assert sums.dtype == normed.dtype == self.stream.dtype
        return [to_float(sums), to_float(normed)]

    def plain(self) -> list[np.ndarray]:
        return [to_float(a) for a in reference.add_norm(self.result, self.stream, self.after, self.before, *self.factors, self.bias)]

    def exact(self) -> list[np.ndarray]:
        def norm(x: np.ndarray, weight: mx.array, eps: float) -> np.ndarray:
            return to_float(weight).astype(np.float64) * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)

        y, x = (to_float(a).astype(np.float64) for a in (self.result, self.stream))
        y = y if self.bias is None else y + to_float(self.bias).astype(np.float64)
        scale, gain = self.factors
        sums = gain * (x + scale * (y if self.after is None else norm(y, *self.after)))
        return [sums, sums if self.before is None else norm(sums, *self.before)]


def check(scene: Scene) -> None:
    with emulated():
        found = scene.run()
    for got, exact, plain in zip(found, scene.exact(), scene.plain(), strict=True):
        scale = np.maximum(np.abs(exact), 1)
        assert np.max(np.abs(got - exact) / scale) < STEP[scene.stream.dtype]
        # Rounded where plain MLX rounds: in 16 bits, the order of a sum hardly ever shows.
        assert scene.stream.dtype == F32 or np.mean(got != plain) < 0.02


@needs_emulator
@pytest.mark.parametrize(
    ("dim", "dtype", "after", "before", "scale", "gain"),
    [
        (8, F32, False, True, 1.0, 1.0),
        (129, F16, True, True, 1.0, 1.0),
        (576, BF16, False, True, 1.0, 1.0),
        (640, BF16, True, True, 1.0, 0.75),
        (1023, F32, True, True, 0.22, 0.3),
        (2050, F16, False, True, 0.22, 1.0),
        (37, F32, True, False, 1.0, 0.3),
        (643, BF16, True, False, 1.0, 1.0),
        (1290, F16, False, False, 0.22, 1.25),
    ],
)
def test_sum_and_norm_are_those_of_float64(dim: int, dtype: mx.Dtype, after: bool, before: bool, scale: float, gain: float) -> None:
    check(Scene(3, dim, dtype, after=after, before=before, scale=scale, gain=gain))


@needs_emulator
@pytest.mark.parametrize(("dim", "dtype", "after"), [(7, F32, False), (130, F16, True), (2880, BF16, False), (1029, F32, True)])
def test_a_bias_is_added_first(dim: int, dtype: mx.Dtype, after: bool) -> None:
    check(Scene(3, dim, dtype, after=after, scale=0.5, biased=True))


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("dim", [2048, 4096, 5120, 8192, 16383, 16384])
def test_widths_of_models(dim: int, dtype: mx.Dtype, after: bool) -> None:
    check(Scene(2, dim, dtype, after=after))


@needs_emulator
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
def test_sanitizers_are_silent_and_no_schedule_changes_a_bit(mode: str, before: bool) -> None:
    scene = Scene(3, 1023, BF16, after=True, before=before, biased=before)
    with emulated(mode=mode, order="random", seed=2):
        found = scene.run()
    with emulated(order="reversed"):
        again = scene.run()
    for a, b in zip(found, again, strict=True):
        assert np.array_equal(a, b)


@needs_emulator
@pytest.mark.parametrize("after", [False, True])
def test_every_row_is_loaded_once_and_stored_once(after: bool) -> None:
    scene = Scene(3, 576, F16, after=after)
    with emulated(), emulator.count_bytes() as counts:
        scene.run()
    count = counts.of("add_norm")
    for name in ("result", "stream"):
        assert (count[name].loaded, count[name].most_loads) == (scene.stream.nbytes, 1)
    for name in ("sums", "normed"):
        assert (count[name].stored, count[name].most_stores) == (scene.stream.nbytes, 1)
    assert count["before"].loaded == scene.stream.nbytes


@pytest.mark.parametrize("has", [(False, False), (True, False), (False, True)])
def test_no_array_of_a_step_is_among_the_inputs_that_callers_keep(has: tuple[bool, bool]) -> None:
    """It would keep the graph of its step."""
    result, stream, norm = mx.zeros((2, 8)), mx.zeros((2, 8)), (mx.zeros(8), 1e-5)
    after, before = (norm if each else None for each in has)
    assert not [a for a in inputs_of(result, stream, after, before, 1.0)[2:] if a is result or a is stream]


def test_what_does_not_fit_is_refused() -> None:
    row, weight = mx.zeros((2, 64)), (mx.zeros(64), 1e-5)
    with pytest.raises(ValueError, match="result, stream and weights"):
        add_norm(row, mx.zeros((3, 64)), None, weight)
    with pytest.raises(ValueError, match="result, stream and weights"):
        add_norm(row, row, (mx.zeros(63), 1e-5), weight)
    with pytest.raises(ValueError, match="result, stream and weights"):
        add_norm(row, row, None, weight, bias=mx.zeros(63))
    with pytest.raises(UnsupportedShapeError, match="bfloat16, float32"):
        add_norm(row, row, None, weight, bias=mx.zeros(64, BF16))
    with pytest.raises(UnsupportedShapeError, match="bfloat16, float32"):
        add_norm(row, row.astype(BF16), None, weight)
    wide = mx.zeros((1, 16385))
    with pytest.raises(UnsupportedShapeError, match="16385 channels"):
        add_norm(wide, wide, None, (wide[0], 1e-5))
