"""The kernels of experts compile as the templates that MLX makes of them, in both address spaces of small arrays."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.kernels.emulated import needs_emulator
from support.oracles.expert_scenes import CLAMPED, SILU, choice, layer

from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.experts.launcher import experts_in, experts_out

mlx_templates = pytest.importorskip("support.kernels.mlx_templates")


@needs_emulator
@pytest.mark.parametrize("dtype", [mx.float16, pytest.param(mx.bfloat16, marks=pytest.mark.long)], ids=str)
def test_experts_compile_as_templates(dtype: mx.Dtype) -> None:
    found = mlx_templates.Templates()
    with run_with(found.maker):
        for kind, unit in (("4/64", SILU), ("mxfp4", CLAMPED), ("plain", SILU)):
            of = layer(kind, 9, 32, 256, dtype, biased=unit == CLAMPED)
            for count in (4, 8):
                experts_in(mx.zeros((1, 256), dtype), choice(1, count, 9), of.matrices, unit)
                experts_out(mx.zeros((1, count, 256), dtype), choice(1, count, 9), mx.zeros((1, count)), of.matrices)
    assert len(found) == 12
    for name, source in found.items():
        assert not mlx_templates.errors(source), name
