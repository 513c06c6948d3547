"""Packed products at the edges: nothing at all, NaN and infinity, and what is refused."""

import mlx.core as mx
import numpy as np
import pytest
from support.oracles.packed_matrices import DTYPES, FORMATS, assert_within, draw, product, random, to_numpy

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

PRECISIONS = list(kernels_cpu.PRECISIONS)
AFFINE = ("affine", 4, 32)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_nothing_gives_nothing(form):
    rng = np.random.default_rng(0)
    k = max(form[2], 32)
    m = draw(rng, form, (5, k))
    packed = m.pack()
    for shape in ((0, k), (2, 0, k)):
        assert packed.multiply(mx.zeros(shape), residual=mx.zeros((*shape[:-1], 5))).shape == (*shape[:-1], 5)
    assert packed.rows(mx.zeros((3, 0), mx.int32), mx.float16).shape == (3, 0, k)
    none = kernels_cpu.pack(*(a[:0] for a in m.arrays), **m.options)
    assert none.multiply(mx.zeros((4, k))).shape == (4, 0)
    experts = draw(rng, form, (2, 5, k)).pack()
    chosen = mx.zeros((0, 3), mx.int32)
    got = experts.multiply(mx.zeros((0, k)), experts=chosen)
    assert got.shape == (0, 3, 5)
    mx.eval(got)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_zeros_give_zeros(form, precision):
    m = draw(np.random.default_rng(0), form, (20, 128))
    got = m.pack(precision).multiply(mx.zeros((3, 128)), norm=mx.ones((128,)), eps=1e-6)
    np.testing.assert_array_equal(got, np.zeros((3, 20)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_nan_and_infinity_do_what_they_do_in_mlx_and_to_their_row_only(form, precision, value):
    rng = np.random.default_rng(1)
    m = draw(rng, form, (37, 256), "float32")
    x = random(rng, (9, 256), "float32")
    spoilt = np.array(x)
    spoilt[4, [3, 200]] = value, 1e3
    packed = m.pack(precision)
    got, clean = np.array(packed.multiply(mx.array(spoilt))), np.array(packed.multiply(x))
    others = [i for i in range(9) if i != 4]
    np.testing.assert_array_equal(got[others], clean[others])
    if form[0] == "plain":
        want = np.array(mx.array(spoilt) @ m.arrays[0].T)
    else:
        want = np.array(mx.quantized_matmul(mx.array(spoilt), *m.arrays, transpose=True, **m.options))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got) * np.sign(got), np.isinf(want) * np.sign(want))
    assert not np.isfinite(got[4]).any()


def test_a_norm_of_nan_is_nan():
    packed = draw(np.random.default_rng(1), AFFINE, (5, 64)).pack()
    x = mx.ones((3, 64))
    x[1, 7] = float("nan")
    got = np.array(packed.multiply(x, norm=mx.ones((64,)), eps=1e-6))
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("where", [1, 2])
def test_weights_of_nan_and_infinity_reach_their_row(where):
    rng = np.random.default_rng(2)
    m = draw(rng, AFFINE, (37, 128), "float32")
    x = random(rng, (3, 128), "float32")
    for value in (np.nan, np.inf):
        spoilt = np.array(m.arrays[where])
        spoilt[20, 1] = value
        arrays = [a if i != where else mx.array(spoilt) for i, a in enumerate(m.arrays)]
        for precision in PRECISIONS:
            got = np.array(kernels_cpu.pack(*arrays, **m.options, precision=precision).multiply(x))
            assert not np.isfinite(got[:, 20]).any()
            assert np.isfinite(np.delete(got, 20, 1)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e25])
def test_activations_of_any_size(precision, size):
    rng = np.random.default_rng(3)
    m = draw(rng, AFFINE, (20, 96), "float32")
    x = random(rng, (4, 96), "float32") * size
    want, error = product(to_numpy(x), m, precision)
    assert_within(m.pack(precision).multiply(x), want, error, "float32")


def test_neighbouring_blocks_of_very_different_size():
    rng = np.random.default_rng(4)
    m = draw(rng, AFFINE, (20, 128))
    x = random(rng, (5, 128), "float32") * mx.repeat(mx.array([1e-6, 1.0, 1e4, 1e-3]), 32)
    for precision in PRECISIONS:
        assert_within(m.pack(precision).multiply(x), *product(to_numpy(x), m, precision), "float32")


def test_halves_overflow_to_infinity():
    m = draw(np.random.default_rng(5), ("plain", 0, 1), (3, 40), "float16")
    got = kernels_cpu.pack(m.arrays[0] * 0 + 60000).multiply(mx.ones((2, 40), mx.float16))
    assert np.isposinf(np.array(got)).all()


def test_scales_of_32_bits_are_kept_where_16_would_lose():
    rng = np.random.default_rng(6)
    x = random(rng, (2, 64), "float32")
    for scales in (1 + 2.0**-20, 2.0**-30, 1e10):
        words = mx.array(rng.integers(0, 2**32, (20, 8), dtype=np.uint32))
        scale = mx.full((20, 2), scales)
        packed = kernels_cpu.pack(words, scale, scale, group_size=32, bits=4, precision="float32")
        want = to_numpy(x) @ to_numpy(mx.dequantize(words, scale, scale, group_size=32, bits=4)).T
        np.testing.assert_allclose(packed.multiply(x), want, rtol=1e-5, atol=1e-5 * scales)


def test_experts_beyond_the_last_mean_the_last():
    rng = np.random.default_rng(7)
    packed = draw(rng, AFFINE, (3, 10, 64)).pack()
    x = random(rng, (4, 64), "float32")
    got, want = (packed.multiply(x, experts=mx.array(chosen)) for chosen in ([0, 1, 3, 1000], [0, 1, 2, 2]))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [1, 5, 80])
def test_rows_with_a_negative_expert_are_zeros_and_change_no_others(rows):
    rng = np.random.default_rng(9)
    packed = draw(rng, AFFINE, (3, 10, 64)).pack()
    x = random(rng, (rows, 64), "float32")
    chosen = rng.integers(0, 3, rows)
    left_out = rng.random(rows) < 0.5
    got = np.array(packed.multiply(x, experts=mx.array(np.where(left_out, -1, chosen))))
    want = np.array(packed.multiply(x, experts=mx.array(chosen)))
    np.testing.assert_array_equal(got, np.where(left_out[:, None], 0, want))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_other_dtypes_than_the_scales_give_float32(dtype):
    rng = np.random.default_rng(8)
    for scales in DTYPES:
        packed = draw(rng, AFFINE, (10, 64), scales).pack()
        assert packed.multiply(random(rng, (2, 64), dtype)).dtype == (DTYPES[dtype] if dtype == scales else mx.float32)


WRONG = {
    "columns": {"x": (3, 65)},
    "no axes": {"x": ()},
    "integers": {"x": mx.zeros((3, 64), mx.int32)},
    "complex": {"x": mx.zeros((3, 64), mx.complex64)},
    "norm": {"norm": (63,)},
    "bias": {"bias": (3, 32)},
    "residual": {"residual": (32,)},
    "experts of one matrix": {"experts": mx.zeros((3,), mx.int32)},
    "gate and residual": {"gate": "silu", "residual": (3, 32)},
    "unknown gate": {"gate": "tanh"},
}


def arrays(arguments: dict[str, object]) -> dict[str, object]:
    return {name: mx.zeros(a) if isinstance(a, tuple) else a for name, a in arguments.items()}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_products_are_refused(wrong):
    packed = draw(np.random.default_rng(0), AFFINE, (32, 64)).pack()
    with pytest.raises(ValueError):
        packed.multiply(**arrays({"x": (3, 64)} | WRONG[wrong]))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"experts": mx.zeros((4,), mx.int32)},
        {"experts": mx.zeros((3,))},
        {"experts": mx.zeros((3,), mx.bool_)},
        {"experts": mx.zeros((3,), mx.int32), "bias": (32,)},
        {"experts": mx.zeros((3, 2), mx.int32), "x": (0, 64)},
    ],
)
def test_wrong_choices_of_experts_are_refused(wrong):
    packed = draw(np.random.default_rng(0), AFFINE, (2, 32, 64)).pack()
    with pytest.raises(ValueError):
        packed.multiply(**arrays({"x": (3, 64)} | wrong))


def test_choices_without_experts_are_refused():
    packed = kernels_cpu.pack(mx.zeros((0, 5, 64)))
    with pytest.raises(ValueError):
        packed.multiply(mx.zeros((3, 64)), experts=mx.zeros((3,), mx.int32))


def test_gates_of_odd_halves_are_refused():
    packed = draw(np.random.default_rng(0), AFFINE, (48, 64)).pack()
    assert not packed.can_gate("silu")
    with pytest.raises(ValueError, match="halves"):
        packed.multiply(mx.zeros((1, 64)), gate="silu")


def test_rows_of_experts_or_at_fractions_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError):
        draw(rng, AFFINE, (2, 5, 64)).pack().rows(mx.zeros((1,), mx.int32), mx.float32)
    with pytest.raises(ValueError):
        draw(rng, AFFINE, (5, 64)).pack().rows(mx.zeros((1,)), mx.float32)
    with pytest.raises(ValueError):
        draw(rng, AFFINE, (5, 64)).pack().rows(mx.zeros((1,), mx.int32), mx.int32)
    with pytest.raises(ValueError):
        kernels_cpu.pack(mx.zeros((0, 64))).rows(mx.zeros((1,), mx.int32), mx.float32)


WORDS, SCALES = mx.zeros((4, 8), mx.uint32), mx.zeros((4, 2))


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ([WORDS, SCALES, SCALES], {"bits": 7}),
        ([WORDS, SCALES, SCALES], {"group_size": 16}),
        ([WORDS, SCALES, SCALES], {"mode": "fp4"}),
        ([WORDS, SCALES, SCALES], {"precision": "int4"}),
        ([WORDS, SCALES], {}),
        ([WORDS, SCALES, mx.zeros((4, 1))], {}),
        ([WORDS, mx.zeros((4, 3)), mx.zeros((4, 3))], {}),
        ([WORDS, SCALES.astype(mx.int32), SCALES.astype(mx.int32)], {}),
        ([WORDS, SCALES, SCALES.astype(mx.float16)], {}),
        ([WORDS.astype(mx.int32), SCALES, SCALES], {}),
        ([WORDS[0], SCALES[0], SCALES[0]], {}),
        ([WORDS[:, :7], SCALES, SCALES], {}),
        ([WORDS[:, :0], SCALES[:, :0], SCALES[:, :0]], {}),
        ([WORDS, SCALES, SCALES], {"mode": "mxfp4"}),
        ([WORDS, SCALES], {"mode": "mxfp4"}),
        ([WORDS[:, :2], mx.zeros((4, 1), mx.uint8)], {"mode": "nvfp4", "group_size": 16}),
        ([mx.zeros((4, 64), mx.int32)], {}),
        ([mx.zeros((64,))], {}),
        ([mx.zeros((4, 0))], {}),
    ],
)
def test_what_is_no_matrix_is_refused(parts, options):
    with pytest.raises(ValueError):
        kernels_cpu.pack(*parts, **({"group_size": 32, "bits": 4} | options))


def test_data_of_another_layout_is_refused():
    rng = np.random.default_rng(0)
    one, other = draw(rng, AFFINE, (5, 64)).pack(), draw(rng, AFFINE, (5, 96)).pack()
    swapped = kernels_cpu.Packed(one.data, other.layout, one.dtype, one.precision)
    for call in (lambda: swapped.multiply(mx.zeros((1, 96))), lambda: swapped.rows(mx.zeros((1,), mx.int32), mx.float32)):
        with pytest.raises(ValueError, match="layout"):
            call()
