"""Products whose kernel also computes the gated unit, in the emulator, compared with float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import emulated, needs_emulator
from support.oracles.gated_products import check_gated, gated
from support.oracles.quantized_products import matrix, rows_of_x
from support.oracles.sealed_pages import to_float

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.quantized_matmul import reference
from mlxinfer.kernels_metal.quantized_matmul.launcher import GATED_ROWS, GATES, ROWS, quantized_matmul
from mlxinfer.kernels_metal.quantized_matmul.trial import Subject, speeds, wrong_products

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32


def check(kind: str, rows: int, half: int, k: int, gate: str, dtype: mx.Dtype = F16, **emulation: str) -> None:
    with emulated(**emulation):  # type: ignore[arg-type]
        check_gated(kind, rows, half, k, gate, dtype)


@needs_emulator
@pytest.mark.parametrize(
    ("kind", "rows", "half", "k", "gate", "dtype"),
    [
        ("4/64", 1, 37, 576, "silu", BF16),
        ("8/32", 3, 19, 2304, "silu", F32),
        ("mxfp4", 5, 21, 1056, "silu", BF16),
        ("6/128", 8, 5, 256, "gelu_tanh", F32),
    ],
)
def test_odd_sizes(kind: str, rows: int, half: int, k: int, gate: str, dtype: mx.Dtype) -> None:
    check(kind, rows, half, k, gate, dtype)


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", ["2/64", "3/128", "4/32", "4/64", "5/32", "6/64", "8/64", "mxfp4"])
def test_all_formats_and_rows(kind: str, gate: str) -> None:
    for rows in range(1, 9):
        check(kind, rows, 11 + rows, 512 + 128 * rows, gate, (F16, BF16, F32)[rows % 3])


@needs_emulator
@pytest.mark.parametrize("gate", GATES)
def test_large_sums(gate: str) -> None:
    """Gates that are far from 0 on either side are lines or nothing, and never NaN."""
    x = rows_of_x(2, 512, F32) * 100
    with emulated():
        found, exact, slack = gated("8/64", x, 19, gate)
    assert np.abs(exact).max() > 1e8
    assert (np.abs(to_float(found) - exact) <= 1e-6 * np.abs(exact) + slack).all()


@needs_emulator
@pytest.mark.parametrize(("mode", "kind", "rows"), [("asan", "4/64", 1), ("tsan", "4/64", 2), ("msan", "mxfp4", 8)])
def test_sanitizers_are_silent(mode: str, kind: str, rows: int) -> None:
    check(kind, rows, 19, 768, "silu" if rows > 1 else "gelu_tanh", BF16, mode=mode, order="random")


@needs_emulator
@pytest.mark.parametrize("rows", [1, 8])
def test_every_schedule_gives_the_same_bits(rows: int) -> None:
    x, found = rows_of_x(rows, 1280, F16), []
    for order in emulator.ORDERS:
        with emulated(order=order, seed=3):
            found.append(np.array(gated("4/64", x, 21, "silu")[0]))
    assert all(np.array_equal(found[0], other) for other in found)


@needs_emulator
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_every_byte_is_read_once_and_half_the_columns_are_written(rows: int) -> None:
    with emulated(), emulator.count_bytes() as counts:
        gated("4/64", rows_of_x(rows, 1024, F16), 40, "silu")
    assert (counts["weight"].loaded, counts["weight"].most_loads) == (counts["weight"].size, 1)
    assert (counts["out"].stored, counts["out"].most_stores) == (rows * 40 * 2, 1)


@needs_emulator
@pytest.mark.long
def test_the_trial_finds_what_is_right_and_times_all_variants() -> None:
    for subject in (
        *(Subject("affine", 4, 64, BF16, "silu"), Subject("mxfp4", 4, 32, BF16, "gelu_tanh")),
        *(Subject("affine", 4, 64, BF16, "silu", "wide"), Subject("mxfp4", 4, 32, BF16, "gelu_tanh", "narrow")),
    ):
        with emulated():
            assert wrong_products(subject) is None
            found = speeds(subject, 0.001, width=256, most_bytes=1 << 16)
        assert tuple(found) == ((1,) if subject.shape else GATED_ROWS[1:])
        assert all(speed.seconds > 0 for speed in found.values())


def test_the_trial_finds_what_is_wrong() -> None:
    def ungated(**_: object):  # type: ignore[no-untyped-def]
        def call(*, inputs, output_shapes, output_dtypes, **_):  # type: ignore[no-untyped-def]
            x, weight, scales, biases = inputs
            y = mx.quantized_matmul(x, weight, scales, biases, group_size=64, bits=4)
            return [y[:, : output_shapes[0][1]].astype(output_dtypes[0])]

        return call

    with run_with(ungated):
        assert "products of 2 rows differ" in (wrong_products(Subject("affine", 4, 64, F32, "silu")) or "")
        assert "products of 1 rows differ" in (wrong_products(Subject("affine", 4, 64, F32, "silu", "wide")) or "")


def test_a_format_has_at_most_eight_variants() -> None:
    """One row has one variant for all classes of shapes."""
    several = len(Subject("affine", 4, 64, BF16).rows) + len(Subject("affine", 4, 64, BF16, "silu").rows)
    assert several + 1 <= 8  # either with a gate or without it
    assert set(GATED_ROWS) < set(ROWS)


def test_the_plain_gates_are_those_of_layers() -> None:
    from mlxinfer.nn.activations import gated as of_layers

    x, up = rows_of_x(3, 64, F32), rows_of_x(5, 64, F32)[:3]
    for gate in GATES:
        assert of_layers(gate).activation == gate if gate == "silu" else of_layers("gelu_pytorch_tanh").activation == gate
        layers = of_layers("silu" if gate == "silu" else "gelu_pytorch_tanh")
        assert mx.allclose(reference.gated(x, up, gate), layers(x, up), atol=1e-6).item()


def test_what_has_no_kernel_is_refused() -> None:
    arrays = matrix("4/64", 16, 256, F16).arrays
    for rows, gate in ((9, "silu"), (2, "relu")):
        with pytest.raises(UnsupportedShapeError, match=f"{rows} rows gated by {gate}"):
            quantized_matmul(rows_of_x(rows, 256, F16), *arrays, bits=4, group_size=64, gate=gate)
