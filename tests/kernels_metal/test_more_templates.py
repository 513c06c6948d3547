"""All kernels except attention and products compile as the templates that MLX makes of them; none is left out."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from support.kernels.emulated import needs_emulator
from support.oracles.append_scenes import AppendScene
from support.oracles.appended_attention import AppendedAttention

from mlxinfer.kernels_metal.add_norm.launcher import add_norm
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.paged_attention.arrays import sealed_arrays
from mlxinfer.kernels_metal.paged_attention.tiles import Shape
from mlxinfer.kernels_metal.router.launcher import choose_experts
from mlxinfer.kernels_metal.router.reference import Rule
from mlxinfer.kernels_metal.sampling_threshold.launcher import threshold
from mlxinfer.kernels_metal.source import ROOT
from mlxinfer.kernels_metal.unseal_pages.launcher import RAW, SEALED, plan_unseal, unseal_pages

mlx_templates = pytest.importorskip("support.kernels.mlx_templates")

ELSEWHERE = {
    "test_templates.py": {"paged_attention_decode", "paged_attention_combine", "paged_attention_prefill", "seal_keys", "seal_values"},
    "test_product_templates.py": {
        *("affine_matmul", "affine_vector", "mxfp4_matmul", "mxfp4_vector"),
        *("block_matmul", "block_dequantize"),
    },
    "test_expert_templates.py": {f"{form}_experts_{way}" for form in ("affine", "mxfp4", "plain") for way in ("in", "out")},
}


def launch_everything(dtype: mx.Dtype) -> None:
    x, weight = mx.zeros((3, 200), dtype), mx.ones((200,), dtype)
    for after in (None, (weight, 1e-5)):
        add_norm(x, x, after, (weight, 1e-6))
    threshold(mx.zeros((2, 2000)), mx.ones((4, 2)))
    for experts, rule, vector in ((60, Rule(4, "none"), None), (160, Rule(22, "sigmoid", True, groups=8, kept=4), mx.ones((160,)))):
        choose_experts(mx.zeros((3, experts), dtype), rule, vector, vector)
    scene = AppendScene(((0, 1, 5), (1, 2, 40)), ((0, 3, 5),), dim=80, value_dim=72, heads=6, dtype=dtype, norms="qk", dims=24)
    scene.run()
    AppendedAttention(scene, (1, 2), (4, 3)).run()
    for bits in (3, 8):
        shape = Shape(dtype, 4, 2, 80, 64, bits, bits)
        pools = [mx.zeros(size, kind) for size, kind in sealed_arrays(shape, 2)]
        raw = [mx.zeros((2, 1, 64, dim), dtype) for dim in (80, 64)]
        unseal_pages(pools, [], [], raw, plan_unseal([(SEALED, 1), (SEALED, 0), (RAW, 0)], (2, 0, 0, 1)), shape)


@needs_emulator
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_these_kernels_compile_as_templates_and_there_are_no_others(dtype: mx.Dtype) -> None:
    found = mlx_templates.Templates()
    with run_with(found.maker):
        launch_everything(dtype)
    for name, source in found.items():
        assert not mlx_templates.errors(source), name
    compiled = {name.split()[0] for name in found}.union(*ELSEWHERE.values())
    files = [path.read_text(encoding="utf-8") for path in ROOT.rglob("*.metal") if "emulator" not in path.parts]
    assert compiled == {name for text in files for name in re.findall(r"^//: kernel (\w+)\(", text, re.MULTILINE)}
