"""The seal kernels in the emulator: bit for bit as the plain quantizer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.formats import v_group
from mlxinfer.kernels_metal.seal_page import reference
from mlxinfer.kernels_metal.seal_page.launcher import seal_keys, seal_values
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles import sealed_pages as plain

BITS = (8, 6, 5, 4, 3, 2)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def pages(dim: int, dtype: mx.Dtype) -> mx.array:
    """Values of all sizes; a constant channel, a constant token, zeros, tiny and largest numbers among them."""
    random = np.random.default_rng(dim)
    x = random.normal(size=(2, 3, 64, dim)) * 10.0 ** random.integers(-6, 4, size=(2, 3, 1, dim))
    x[0, 0, :, 3] = 1.7
    x[0, 2, 5] = -0.3
    x[0, 1, :, 4] = 0
    x[0, 1, 7] = 0
    x[0, 1, :, 6] *= 1e-3
    x[1, 0, 9, 2:4] = (-60000, 65504)
    return mx.array(x.astype(np.float32)).astype(dtype)


def check(x: mx.array, bits: int) -> None:
    numbers = plain.to_float(x)
    expected = plain.seal_keys(numbers, bits)[0] + plain.seal_values(numbers, bits, v_group(x.shape[-1]))[0]
    with emulated():
        found = seal_keys(x, bits) + seal_values(x, bits)
    assert [a.dtype for a in found] == [mx.uint32, mx.float16] * 2
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(np.array(a), b)


@needs_emulator
@pytest.mark.parametrize(("bits", "dim"), [(8, 64), (6, 80), (5, 96), (4, 128), (3, 80), (2, 64), (5, 80), (3, 512)])
def test_codes_and_scales_are_those_of_the_plain_quantizer(bits: int, dim: int) -> None:
    check(pages(dim, DTYPES[bits % 3]), bits)


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_head_sizes_and_dtypes(bits: int, dim: int, dtype: mx.Dtype) -> None:
    check(pages(dim, dtype), bits)


@needs_emulator
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
def test_sanitizers_are_silent(mode: str) -> None:
    x = pages(40, mx.bfloat16)
    with emulated(mode=mode, order="random"):
        found = seal_keys(x, 3) + seal_values(x, 3)
    with emulated(order="reversed"):
        again = seal_keys(x, 3) + seal_values(x, 3)
    for a, b in zip(found, again, strict=True):
        assert np.array_equal(np.array(a), np.array(b))


@pytest.mark.smoke
@needs_emulator
@pytest.mark.parametrize("bits", [3, 8])
def test_every_byte_is_loaded_once_and_stored_once(bits: int) -> None:
    x = pages(80, mx.float16)
    with emulated(), emulator.count_bytes() as counts:
        sealed = seal_keys(x, bits) + seal_values(x, bits)
    for kernel, arrays in (("seal_keys", sealed[:2]), ("seal_values", sealed[2:])):
        count = counts.of(kernel)
        assert (count["pages"].loaded, count["pages"].most_loads) == (x.nbytes, 1)
        assert [count[name].stored for name in ("codes", "scales")] == [a.nbytes for a in arrays]
        assert count["codes"].most_stores == count["scales"].most_stores == 1


@needs_emulator
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_spoils_its_group_only(value: float) -> None:
    x = np.array(pages(64, mx.float32))
    x[0, 2, 11, 13] = value
    with emulated(mode="asan"):
        keys = reference.unseal_keys(seal_keys(mx.array(x), 4), 4)
        values = reference.unseal_values(seal_values(mx.array(x), 4), 4, 64)
    x[0, 2, 11, 13] = 0
    _, clean_keys = plain.seal_keys(x, 4)
    _, clean_values = plain.seal_values(x, 4, 64)
    clean_keys[0, 2, :, 13] = clean_values[0, 2, 11] = 0
    found_keys, found_values = np.array(keys), np.array(values)
    found_keys[0, 2, :, 13] = found_values[0, 2, 11] = 0
    assert np.allclose(found_keys, clean_keys, rtol=1e-6, atol=1e-9)
    assert np.allclose(found_values, clean_values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dim", [40, 64, 80])
@pytest.mark.parametrize("bits", BITS)
def test_the_plain_inverse(bits: int, dim: int) -> None:
    x = plain.to_float(pages(dim, mx.float32))
    keys, meant_keys = plain.seal_keys(x, bits)
    values, meant_values = plain.seal_values(x, bits, v_group(dim))
    assert np.allclose(np.array(reference.unseal_keys([mx.array(a) for a in keys], bits)), meant_keys, rtol=1e-6, atol=1e-30)
    assert np.allclose(np.array(reference.unseal_values([mx.array(a) for a in values], bits, dim)), meant_values, rtol=1e-6, atol=1e-30)


@needs_emulator
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_constant_comes_back_exactly(dtype: mx.Dtype) -> None:
    x = pages(64, dtype)
    with emulated():
        keys = reference.unseal_keys(seal_keys(x, 3), 3)
        values = reference.unseal_values(seal_values(x, 3), 3, 64)
    assert mx.array_equal(keys[0, 0, :, 3], x[0, 0, :, 3])
    assert mx.array_equal(keys[0, 1, :, 4], mx.zeros(64))
    assert mx.array_equal(values[0, 2, 5], x[0, 2, 5])
    assert mx.array_equal(values[0, 1, 7], mx.zeros(64))


@pytest.mark.smoke
def test_sixteen_bits_are_only_turned() -> None:
    x = pages(64, mx.bfloat16)
    assert mx.array_equal(seal_keys(x, 16)[0], x.swapaxes(-1, -2))
    assert mx.array_equal(seal_values(x, 16)[0], x)


def test_what_cannot_be_sealed_is_refused() -> None:
    x = pages(64, mx.float32)
    with pytest.raises(UnsupportedShapeError, match="7 bits"):
        seal_keys(x, 7)
    with pytest.raises(UnsupportedShapeError, match="heads of 60"):
        seal_values(x[..., :60], 4)
    with pytest.raises(UnsupportedShapeError, match="int32"):
        seal_values(x.astype(mx.int32), 4)
    with pytest.raises(ValueError, match="pages to seal"):
        seal_keys(x[:, :, :63], 4)
