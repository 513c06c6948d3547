"""The product kernels compile as the templates that MLX makes of them."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.emulated import needs_emulator
from support.quantized_products import matrix, rows_of_x

from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.quantized_matmul.block_formats import BLOCKS
from mlxinfer.kernels_metal.quantized_matmul.launcher import ROWS, block_dequantize

mlx_templates = pytest.importorskip("support.mlx_templates")


@pytest.mark.long
@needs_emulator
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_products_compile_as_templates(dtype: mx.Dtype) -> None:
    found = mlx_templates.Templates()
    with run_with(found.maker):
        for index, kind in enumerate(("4/64", "3/32", "8/128", "mxfp4", *BLOCKS)):
            weights = matrix(kind, 16, 512, dtype)
            for rows in (ROWS[index % 3], ROWS[3 + index % 2]):
                weights.times(rows_of_x(rows, 512, dtype))
            if kind in BLOCKS:
                block_dequantize(weights.arrays[0], kind, dtype)
    assert len(found) == 20 + len(BLOCKS)
    for name, source in found.items():
        assert not mlx_templates.errors(source), name
