"""Kernels compile as the templates that MLX makes of them, with two-phase lookup of names and MLX's own declarations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from support.kernels.emulated import needs_emulator
from support.kernels.mlx_templates import Templates, declarations, errors
from support.oracles.decode_scenes import Scene
from support.oracles.prefill_scenes import PrefillScene

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.seal_page.launcher import seal_keys, seal_values

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
# With one query head to a KV head and with three.
PAIRS = [((4, 3), F32, 64), ((5, 6), F16, 128), ((16, 8), BF16, 80), ((16, 16), BF16, 256)]


def launch_everything(k_bits: int, v_bits: int, dtype: mx.Dtype, dim: int) -> None:
    """Every kernel of a layer: decode over own and shared pages, in parts and combined; prefill; sealing."""
    for heads in (1, 3):
        settings: dict[str, Any] = {"heads": heads, "kv_heads": 2, "dtype": dtype}
        mx.eval(Scene(((1, 3000), (1, 65)), k_bits, v_bits, dim, sinks=True, cores=40, **settings).run())
        mx.eval(Scene(((8, 90), (1, 65)), k_bits, v_bits, dim, softcap=5.0, window=40, **settings).run())
    if min(k_bits, v_bits) < 16:
        mx.eval(PrefillScene(((70, 70),), k_bits, v_bits, dim, dtype=dtype, window=40, softcap=2.0, sinks=True).run())
    pages = mx.zeros((2, 3, 64, dim), dtype)
    mx.eval(seal_keys(pages, k_bits), seal_values(pages, v_bits))


def compiled(k_bits: int, v_bits: int, dtype: mx.Dtype, dim: int) -> Templates:
    found = Templates()
    with run_with(found.maker):
        launch_everything(k_bits, v_bits, dtype, dim)
    return found


def check(templates: Templates) -> None:
    for name, source in templates.items():
        assert " decltype(" in source, name
        assert not errors(source), name


@needs_emulator
@pytest.mark.parametrize(("pair", "dtype", "dim"), PAIRS, ids=str)
def test_every_kernel_compiles_as_a_template(pair: tuple[int, int], dtype: mx.Dtype, dim: int) -> None:
    templates = compiled(*pair, dtype, dim)
    kernels = {name.split()[0] for name in templates}
    assert {"paged_attention_decode", "paged_attention_combine"} <= kernels
    assert len(kernels) == 5 - pair.count(16) - (pair == (16, 16))
    check(templates)


@pytest.mark.metal
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("pair", "dtype"), [(pair, dtype) for pair, dtype, _ in PAIRS], ids=str)
def test_apples_compiler_takes_every_kernel(pair: tuple[int, int], dtype: mx.Dtype, dim: int) -> None:
    """And the GPU its threadgroups."""
    launch_everything(*pair, dtype, dim)


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("k_bits", [16, 8, 6, 5, 4, 3, 2])
def test_every_format_compiles_as_a_template(k_bits: int, dtype: mx.Dtype, dim: int) -> None:
    for v_bits in (16, 8, 6, 5, 4, 3, 2):
        check(compiled(k_bits, v_bits, dtype, dim))


def refused(source: str, header: str) -> str:
    kernel = emulator.metal_kernel("broken", ["x"], ["out"], source, header)
    return errors(emulator.mlx_source(kernel, [mx.zeros(9)], output_dtypes=[F32], template=[("T", F32)]))


@needs_emulator
def test_what_only_a_template_gets_wrong_is_found() -> None:
    assert not refused("out[0] = T(x[0]);", "")
    assert "undeclared identifier 'later'" in refused("if (sizeof(T) == 1) out[0] = later;", "")
    assert "missing 'typename'" in refused("out[0] = Kind<T>::type(x[0]);", "template <typename U> struct Kind { typedef U type; };")


@needs_emulator
def test_a_name_of_mlx_is_found() -> None:
    assert "Limits" in refused("out[0] = x[0];", "struct Limits {};")
    assert "ambiguous" in refused(
        "out[0] = simd_shuffle(x[0], 1) + simd_shuffle(1l, 2);", "inline int64_t simd_shuffle(int64_t x, int lane);"
    )


def test_the_declarations_are_those_of_this_mlx() -> None:
    text = "\n".join(declarations())
    for known in ("struct Limits", "struct WorkPerThread", "uint64_t simd_shuffle(uint64_t data, uint16_t lane)", "ceildiv(T N, U M)"):
        assert known in text
