"""The CUDA twin of fused launches: gated products, and attention that appends the step's rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support.kernels import cuda_cpu
from support.kernels.cuda_compiled import PTX, QUICK, Compiled, needs_nvrtc
from support.kernels.emulated import emulated, needs_emulator
from support.oracles.append_scenes import AppendScene
from support.oracles.appended_attention import AppendedAttention
from support.oracles.gated_products import check_gated, gated
from support.oracles.quantized_products import matrix, rows_of_x
from support.oracles.sealed_pages import to_float

from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.quantized_matmul.block_formats import BLOCKS
from mlxinfer.kernels_metal.quantized_matmul.launcher import GATED_ROWS, GATES, block_dequantize

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
ATTENTION = AppendedAttention(
    AppendScene(((1, 2, 40), (0, 1, 63)), ((1, 32, 40),), dim=80, value_dim=72, heads=6, dtype=F16, norms="qk", dims=24),
    (1, 3),
    (8, 3),
    window=100,
    sinks=True,
)


def products(rows: int, dtype: mx.Dtype) -> None:
    """With a gate, of either kind of codes."""
    for kind, gate in zip(("4/64", "mxfp4"), GATES, strict=True):
        gated(kind, rows_of_x(rows, 256, dtype), 8, gate)


@pytest.mark.long
@needs_nvrtc
@pytest.mark.parametrize("rows", GATED_ROWS)
def test_gated_products_compile_and_stay_in_registers(rows: int) -> None:
    compiled = Compiled(PTX)
    with run_with(compiled.maker):
        products(rows, BF16)
    assert len(compiled) == len(GATES)
    assert not any("ld.local" in ptx for ptx in compiled)


@pytest.mark.long
@needs_nvrtc
def test_attention_that_appends_compiles() -> None:
    compiled = Compiled(PTX, *QUICK)
    with run_with(compiled.maker):
        ATTENTION.run()
    assert len(compiled) == 1


@needs_emulator
@pytest.mark.parametrize(
    ("kind", "rows", "half", "k", "gate", "dtype"),
    [
        ("4/64", 1, 19, 576, "silu", BF16),
        ("mxfp4", 2, 21, 544, "gelu_tanh", F16),
        ("3/128", 3, 9, 512, "gelu_tanh", F32),
        ("mxfp4", 7, 5, 1056, "silu", BF16),
    ],
)
def test_gated_products_as_translated_are_right(kind: str, rows: int, half: int, k: int, gate: str, dtype: mx.Dtype) -> None:
    with run_with(cuda_cpu.maker):
        check_gated(kind, rows, half, k, gate, dtype)


@needs_emulator
def test_attention_that_appends_as_translated_is_that_of_the_emulator() -> None:
    with emulated():
        expected = [to_float(x) for x in ATTENTION.run()]
    with run_with(cuda_cpu.maker):
        found = [to_float(x) for x in ATTENTION.run()]
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() <= 2.0**-10 * np.abs(theirs).max()


@needs_emulator
@pytest.mark.parametrize("kind", BLOCKS)
def test_unpacking_blocks_as_translated_is_right_to_the_bit(kind: str) -> None:
    weights = matrix(kind, 5, 512, F16)
    with run_with(cuda_cpu.maker):
        found = block_dequantize(weights.arrays[0], kind, F16)
    assert np.array_equal(to_float(found), weights.numbers.astype(np.float16).astype(np.float32))
