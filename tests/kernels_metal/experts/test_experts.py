"""Experts of few rows, in the emulator against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.kernels import cuda_cpu
from support.kernels.cuda_compiled import PTX, Compiled, needs_nvrtc
from support.kernels.emulated import emulated, needs_emulator
from support.oracles.expert_scenes import (
    CLAMPED,
    GELU,
    NOTHING,
    RELU2,
    SILU,
    UNITS,
    check_in,
    check_out,
    choice,
    compute_both,
    layer,
    random,
)

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.experts import reference
from mlxinfer.kernels_metal.experts.launcher import Form, Matrices, Unit, experts_in, experts_out, why_no_unit
from mlxinfer.kernels_metal.quantized_matmul.launcher import BITS, GROUPS

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
DTYPES = (F16, BF16, F32)
KINDS = [*(f"{bits}/{group}" for bits in BITS for group in GROUPS), "mxfp4", "plain"]
SIZES = ((38, 768), (6, 256), (50, 1152), (34, 384))
"""N and K: tiles that are not full, one to five steps of 256 numbers."""
ROWS = (1, 2, 3, 8)


def check_kind(index: int, rows: int, count: int, dtype: mx.Dtype) -> None:
    """Both kernels in a format, with a unit and with biases by turns."""
    n, k = SIZES[index % 4]
    of = layer(KINDS[index], 7, n, k, dtype, biased=index % 2 == 0)
    chosen = choice(rows, count, 7)
    check_in(of, chosen, UNITS[index % len(UNITS)], dtype)
    check_out(of, chosen, dtype, added=index % 3 == 0)


@needs_emulator
@pytest.mark.parametrize("index", [pytest.param(i, marks=pytest.mark.slow if i % 2 and i < 18 else (), id=k) for i, k in enumerate(KINDS)])
def test_all_formats(index: int) -> None:
    with emulated():
        check_kind(index, ROWS[index % 4], 1 + index % 5, DTYPES[index % 3])


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(KINDS)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_combinations(index: int, dtype: mx.Dtype) -> None:
    with emulated():
        for rows in ROWS:
            for count in (1, 4, 7):
                check_kind(index, rows, count, dtype)


@needs_emulator
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize(("kind", "dtype"), [("4/64", BF16), ("mxfp4", F16)])
def test_all_units(unit: Unit, kind: str, dtype: mx.Dtype) -> None:
    of = layer(kind, 5, 22, 576, dtype, biased=unit == CLAMPED)
    with emulated():
        check_in(of, choice(2, 3, 5), unit, dtype)


@needs_emulator
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9])
def test_all_numbers_of_experts(count: int) -> None:
    """Fewer than 8 numbers are in another address space."""
    of = layer("4/32", 9, 20, 96, F16)
    with emulated():
        for rows in (1, 3):
            check_in(of, choice(rows, count, 9), SILU, F16)
            check_out(of, choice(rows, count, 9), F16)


@needs_emulator
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
@pytest.mark.parametrize(("kind", "rows", "count"), [("5/64", 1, 3), ("3/32", 2, 8), ("mxfp4", 3, 4), ("plain", 1, 2)])
def test_sanitizers_are_silent(mode: str, kind: str, rows: int, count: int) -> None:
    of = layer(kind, 8, 38, 640, BF16, biased=kind == "mxfp4")
    with emulated(mode=mode, order="random"):
        check_in(of, choice(rows, count, 8), CLAMPED if kind == "mxfp4" else GELU, BF16)
        check_out(of, choice(rows, count, 8), BF16, added=rows > 1)


@needs_emulator
@pytest.mark.parametrize(("kind", "rows"), [("4/64", 1), ("mxfp4", 3)])
def test_every_schedule_gives_the_same_bits(kind: str, rows: int) -> None:
    of, chosen = layer(kind, 6, 38, 1280, F16, biased=True), choice(rows, 4, 6)
    x, shares = mx.array(random(rows, 1280, seed=2)).astype(F16), mx.array(random(rows, 4, seed=3))
    inner = mx.array(random(rows, 4, 1280, seed=4)).astype(F16)
    found = []
    for order in emulator.ORDERS:
        for seed in (1, 2):
            with emulated(order=order, seed=seed):
                results = experts_in(x, chosen, of.matrices, SILU), experts_out(inner, chosen, shares, of.matrices)
                found.append([np.array(y.view(mx.uint16)) for y in results])
    assert all(np.array_equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


@needs_emulator
def test_no_barrier_is_missing_and_every_byte_of_codes_is_read_once_per_pair() -> None:
    of, chosen = layer("4/64", 6, 48, 1024, F16), mx.array([[1, 4], [4, 0]], mx.uint32)
    matrix = of.matrices.arrays[0].nbytes // 6
    x, shares = mx.array(random(2, 1024, seed=2)).astype(F16), mx.array(random(2, 2, seed=3))
    inner = mx.array(random(2, 2, 1024, seed=4)).astype(F16)
    for run, width in (
        (lambda: experts_in(x, chosen, of.matrices, GELU), 2 * 2 * 24),
        (lambda: experts_out(inner, chosen, shares, of.matrices), 2 * 48),
    ):
        with emulated(mode="trace"), emulator.count_bytes() as counts:
            run()
        assert (counts["weight"].loaded, counts["weight"].distinct_loaded) == (4 * matrix, 3 * matrix)
        assert counts["weight"].most_loads == 2  # expert 4, by two rows
        assert (counts["out"].stored, counts["out"].most_stores) == (2 * width, 1)


@needs_emulator
@pytest.mark.parametrize(("kind", "unit", "dtype"), [("4/64", SILU, BF16), ("mxfp4", CLAMPED, F16), ("plain", RELU2, F32)])
def test_they_are_right_as_translated_to_cuda(kind: str, unit: Unit, dtype: mx.Dtype) -> None:
    of = layer(kind, 5, 38, 576, dtype, biased=unit == CLAMPED)
    with run_with(cuda_cpu.maker):
        check_in(of, choice(2, 3, 5), unit, dtype)
        check_out(of, choice(2, 3, 5), dtype, added=True)


@pytest.mark.long
@needs_nvrtc
@pytest.mark.parametrize("kind", ["4/64", "8/32", "mxfp4", "plain"])
def test_they_compile_for_cuda_and_stay_in_registers(kind: str) -> None:
    compiled = Compiled(PTX)
    with run_with(compiled.maker):
        compute_both(kind)
    assert len(compiled) == 2
    assert not any("ld.local" in ptx for ptx in compiled)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("kind", ["4/64", "mxfp4", "plain"])
def test_plain_mlx_computes_the_same(kind: str, unit: Unit) -> None:
    with mx.stream(mx.cpu):
        of, chosen = layer(kind, 5, 24, 64, F32, biased=True), choice(3, 2, 5)
        x, shares = mx.array(random(3, 64, seed=2, size=0.1)), mx.array(random(3, 2, seed=3))
        inner, added = mx.array(random(3, 2, 64, seed=4)), mx.array(random(3, 24, seed=5))
        sums = np.einsum("tk,tjnk->tjn", np.array(x), of.numbers[np.array(chosen)]) + of.bias[np.array(chosen)]
        gates = sums if unit.sides == 1 else np.split(sums, 2, axis=-1)
        expected = reference.activated(mx.array(sums), unit) if unit.sides == 1 else reference.gated(*map(mx.array, gates), unit)
        assert mx.allclose(reference.experts_in(x, chosen, of.matrices, unit), expected, rtol=1e-3, atol=1e-3).item()
        each = np.einsum("tjk,tjnk->tjn", np.array(inner), of.numbers[np.array(chosen)]) + of.bias[np.array(chosen)]
        summed = (each * np.array(shares)[..., None]).sum(1) + np.array(added)
        assert mx.allclose(reference.experts_out(inner, chosen, shares, of.matrices, added), mx.array(summed), rtol=1e-3, atol=1e-3).item()


def test_what_has_no_kernel_is_refused() -> None:
    of, x, chosen = layer("4/64", 4, 16, 256, F16), mx.zeros((2, 256), F16), choice(2, 2, 4)
    form, arrays = of.matrices.form, of.matrices.arrays
    with pytest.raises(UnsupportedShapeError, match="7 bits"):
        experts_in(x, chosen, Matrices(Form("affine", 7, 64), arrays), SILU)
    with pytest.raises(UnsupportedShapeError, match="no experts with gelu;"):
        experts_in(x, chosen, of.matrices, Unit("gelu"))
    with pytest.raises(UnsupportedShapeError, match="multiples of 1/1000"):
        experts_in(x, chosen, of.matrices, Unit("clamped_swiglu", 1.7021, 0.12345))
    with pytest.raises(UnsupportedShapeError, match="biases of"):
        experts_in(x, chosen, Matrices(form, arrays, mx.zeros((4, 16))), SILU)
    with pytest.raises(ValueError, match="do not multiply"):
        experts_in(x[:, :128], chosen, of.matrices, SILU)
    with pytest.raises(ValueError, match="biases are"):
        experts_in(x, chosen, Matrices(form, arrays, mx.zeros((4, 8), F16)), SILU)
    with pytest.raises(ValueError, match="expected"):
        experts_in(x, chosen[:1], of.matrices, SILU)
    with pytest.raises(ValueError, match="expected"):
        experts_out(x, chosen, mx.zeros((2, 2)), of.matrices)
    odd = layer("4/64", 4, 15, 256, F16)
    with pytest.raises(ValueError, match="no half"):
        experts_in(x, chosen, odd.matrices, SILU)
    assert why_no_unit(CLAMPED) is None
    assert why_no_unit(NOTHING) is None
