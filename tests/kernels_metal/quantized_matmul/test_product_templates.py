"""The product kernels compile as the templates that MLX makes of them."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.kernels.emulated import needs_emulator
from support.oracles.quantized_products import matrix, rows_of_x

from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.quantized_matmul.block_formats import BLOCKS
from mlxinfer.kernels_metal.quantized_matmul.launcher import GATED_ROWS, ROWS, block_dequantize, quantized_matmul

mlx_templates = pytest.importorskip("support.kernels.mlx_templates")


@needs_emulator
@pytest.mark.parametrize(
    "dtype", [pytest.param(mx.float16, marks=pytest.mark.slow), pytest.param(mx.bfloat16, marks=pytest.mark.long)], ids=str
)
def test_products_compile_as_templates(dtype: mx.Dtype) -> None:
    found = mlx_templates.Templates()
    with run_with(found.maker):
        for index, kind in enumerate(("4/64", "3/32", "8/128", "mxfp4", *BLOCKS)):
            weights = matrix(kind, 16, 512, dtype)
            for rows in (ROWS[index % 3], ROWS[3 + index % 2]):
                weights.times(rows_of_x(rows, 512, dtype))
            if kind in BLOCKS:
                block_dequantize(weights.arrays[0], kind, dtype)
        for index, rows in enumerate(GATED_ROWS):
            gate = "silu" if index % 2 else "gelu_tanh"
            quantized_matmul(rows_of_x(rows, 512, dtype), *matrix("4/64", 16, 512, dtype).arrays, bits=4, group_size=64, gate=gate)
        quantized_matmul(
            rows_of_x(8, 512, dtype), *matrix("mxfp4", 16, 512, dtype).arrays, None, bits=4, group_size=32, mode="mxfp4", gate="silu"
        )
    assert len(found) == 20 + len(BLOCKS) + len(GATED_ROWS) + 1
    for name, source in found.items():
        assert not mlx_templates.errors(source), name
