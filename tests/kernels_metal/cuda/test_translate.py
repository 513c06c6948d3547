"""The Metal kernels translated to CUDA: compiled for an H100, which need not exist, and run on the CPU."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest
from support.kernels import cuda_cpu, nvrtc
from support.kernels.cuda_compiled import PTX, QUICK, Compiled, needs_nvrtc
from support.kernels.emulated import emulated, needs_emulator
from support.oracles import sealed_pages
from support.oracles.append_scenes import AppendScene
from support.oracles.decode_scenes import Scene
from support.oracles.expert_scenes import compute_both
from support.oracles.prefill_scenes import PrefillScene
from support.oracles.quantized_products import matrix, rows_of_x
from support.oracles.sealed_pages import to_float

from mlxinfer.kernels_metal.add_norm.launcher import add_norm
from mlxinfer.kernels_metal.cuda import CudaKernel, translate
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.quantized_matmul.launcher import block_dequantize
from mlxinfer.kernels_metal.router.launcher import choose_experts
from mlxinfer.kernels_metal.router.reference import Rule
from mlxinfer.kernels_metal.sampling_threshold.launcher import threshold
from mlxinfer.kernels_metal.seal_page.launcher import seal_keys, seal_values
from mlxinfer.kernels_metal.source import ROOT

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
BITS = (16, 8, 6, 5, 4, 3, 2)
PAIRS = list(zip(BITS, (*BITS[1:], 16), strict=True))
"""Of bits of keys and of values, each once."""
PRODUCTS = ("4/64", "Q4_K", "3/32", "Q5_K", "8/128", "Q6_K", "mxfp4", "6/64", "Q8_0", "5/32", "2/32", "Q5_0", "Q4_0")
"""Formats of quantized matrices."""
EXPERTS = ("4/64", "mxfp4", "plain")
"""Formats of the matrices of experts, one of each pair of kernels."""


@pytest.mark.parametrize(
    ("metal", "cuda"),
    [
        ("const device float* p = x;", "const  float* p = x;"),
        ("threadgroup half tile[64];", "__shared__ half tile[64];"),
        ("threadgroup vec<half, 4>* p = q;", " vec<half, 4>* p = q;"),
        ("f((const threadgroup uint*)p)", "f((const  uint*)p)"),
        ("float x = 2.0 + 1e-3 + .5f + 3;", "float x = 2.0f + 1e-3f + .5f + 3;"),
        ("half h = 1.5h;", "half h = half(1.5f);"),
        ("uint x = 0x4B000000u + 7u;", "uint x = 0x4B000000u + 7u;"),
        ("// a device\nx = 1;", "// a device\nx = 1;"),
        ("#pragma clang loop unroll(full)\nfor (;;) {}", "#pragma unroll\nfor (;;) {}"),
        ("#define HALF(p) (*(device half*)(p) * 0.5)", "#define HALF(p) (*( half*)(p) * 0.5f)"),
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", "threadgroup_barrier(mem_flags::mem_threadgroup);"),
    ],
)
def test_words(metal: str, cuda: str) -> None:
    assert translate(metal, "")[0].endswith(f"\n{cuda}")


def test_inputs_without_dimensions_are_pointers() -> None:
    body, _ = translate("y = scale * o.scale + scales;", "", ["scale"])
    assert body.endswith("\ny = (*scale) * o.scale + scales;")


def test_functions_of_a_header_run_on_the_device() -> None:
    header = "inline int f(const thread int& x) { return x; }\nconstexpr int g(int x) { return x; }\nconstant constexpr int h = f(1);"
    expected = (
        "__device__ inline int f(const  int& x) { return x; }\n__device__ constexpr int g(int x) { return x; }\n constexpr int h = f(1);"
    )
    assert f"\nnamespace metal {{\n{expected}\n}}\n" in translate("", header)[1]


def test_names_that_cuda_has_as_well_are_declared() -> None:
    body, _ = translate("float4 v = float4(exp(x));", "")
    assert "using metal::exp;" in body
    assert "using metal::float4;" in body
    assert "using metal::tanh;" not in body


def test_threads_have_their_names() -> None:
    body, _ = translate("out[thread_position_in_grid.x] = 1;", "")
    assert "const metal::uint3 thread_position_in_grid = " in body
    assert "simdgroup" not in body


def test_a_grid_that_cuda_would_round_up_is_refused() -> None:
    kernel = CudaKernel("copy", ["x"], ["out"], "out[0] = x[0];")
    with pytest.raises(ValueError, match="no multiple"):
        kernel(inputs=[mx.zeros(9)], output_shapes=[(9,)], output_dtypes=[F32], grid=(33, 1, 1), threadgroup=(32, 1, 1))


def launch_everything(k_bits: int, v_bits: int, dtype: mx.Dtype) -> None:
    """Appending rows, decode over runs of pages and its combination, prefill, unpacking, sealing."""
    AppendScene(((0, 1, 5),), ((0, 3, 5),), dtype=dtype, norms="qk", dims=64).run()
    Scene(((1, 3000), (1, 65)), k_bits, v_bits, dtype=dtype, sinks=True, cores=40, apart=3).run()
    scene = PrefillScene(((70, 70),), k_bits, v_bits, dtype=dtype, window=40, softcap=2.0, sinks=True)
    scene.run()
    scene.unseal()
    pages = mx.zeros((2, 3, 64, 64), dtype)
    seal_keys(pages, k_bits)
    seal_values(pages, v_bits)


@pytest.mark.long
@needs_nvrtc
def test_every_kernel_compiles_for_sm_90() -> None:
    compiled = Compiled()
    with run_with(compiled.maker):
        launch_everything(5, 4, F16)
    assert len(compiled) == 7
    assert all(".target sm_90" in ptx for ptx in compiled)


@needs_nvrtc
@pytest.mark.parametrize(
    ("pair", "dtype"),
    [
        ((8, 6), F16),
        *(pytest.param(*more, marks=pytest.mark.long) for more in (((4, 3), F32), ((2, 16), BF16))),
    ],
    ids=str,
)
def test_every_number_of_bits_compiles(pair: tuple[int, int], dtype: mx.Dtype) -> None:
    compiled = Compiled(PTX, *QUICK)
    with run_with(compiled.maker):
        launch_everything(*pair, dtype)
    assert len(compiled) == 7 - pair.count(16)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_all_of_them_compile_for_sm_90(pair: tuple[int, int], dtype: mx.Dtype) -> None:
    compiled = Compiled()
    with run_with(compiled.maker):
        launch_everything(*pair, dtype)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("dim", [80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16])
def test_all_shapes_compile(dim: int, heads: int) -> None:
    compiled = Compiled(PTX, *QUICK)
    with run_with(compiled.maker):
        Scene(((1, 300), (2, 66)), dim=dim, heads=heads, kv_heads=1, dtype=BF16).run()
        PrefillScene(((70, 70),), dim=dim, group=heads, kv_heads=1, dtype=BF16).run()


@needs_nvrtc
def test_prefill_keeps_its_matrices_in_registers() -> None:
    """An array that is indexed by anything but constants ends up in memory."""
    compiled = Compiled(PTX)
    with run_with(compiled.maker):
        PrefillScene(((70, 70),), dim=512, group=1, dtype=F16).run()
    assert "ld.local" not in compiled[0]
    assert "bar.sync" in compiled[0]


def multiply(index: int) -> None:
    kind = PRODUCTS[index]
    matrix(kind, 16, 512, BF16).times(rows_of_x((1, 2, 4, 8, 16)[index % 5], 512, BF16))


@pytest.mark.long
@needs_nvrtc
def test_products_compile() -> None:
    compiled = Compiled(PTX, *QUICK)
    with run_with(compiled.maker):
        for index in range(len(PRODUCTS)):
            multiply(index)
        block_dequantize(matrix("Q4_0", 16, 512, BF16).arrays[0], "Q4_0", F16)
    assert len(compiled) == len(PRODUCTS) + 1


@needs_nvrtc
@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=pytest.mark.long if i % 3 == 0 else pytest.mark.slow) for i in range(len(PRODUCTS))]
)
def test_pieces_of_products_stay_in_registers(index: int) -> None:
    compiled = Compiled(PTX)
    with run_with(compiled.maker):
        multiply(index)
    assert not any("ld.local" in ptx for ptx in compiled)


@needs_nvrtc
def test_an_error_names_the_line() -> None:
    code = nvrtc.cuda_source("bad", [("x", mx.zeros(9))], [("out", F32)], "out[0] = x[0];\nout[1] = nowhere;", "")
    with pytest.raises(nvrtc.CompileError, match=r"bad\.metal\(\d+\): error: identifier \"nowhere\""):
        nvrtc.compile_cuda(code)


def between_layers(dtype: mx.Dtype = BF16, rows: int = 3, dim: int = 641) -> list[mx.array]:
    """Sums and normed sums."""
    random = np.random.default_rng(dim)
    result, stream = (mx.array(random.normal(size=(rows, dim)).astype(np.float32)).astype(dtype) for _ in range(2))
    weight = mx.array(random.normal(size=dim).astype(np.float32)).astype(dtype)
    return list(add_norm(result, stream, (weight, 1e-5), (weight, 1e-6)))


def cut(vocabulary: int = 1500) -> mx.array:
    """The lowest logits that stay, by top-p, by top-k and by both."""
    logits = (np.random.default_rng(5).normal(size=(4, vocabulary)) * 3).astype(np.float32)
    return threshold(mx.array(logits), mx.array([[vocabulary, 0.9], [20, 1], [40, 0.8], [vocabulary, 0.3]], mx.float32))


def routed(dtype: mx.Dtype = BF16, experts: int = 160) -> list[mx.array]:
    """Experts and weights, with groups, bias and gains, and without."""
    random = np.random.default_rng(experts)
    logits = mx.array(random.normal(size=(3, experts)).astype(np.float32)).astype(dtype)
    vector = mx.array(random.normal(size=experts).astype(np.float32))
    rules = Rule(22, "sigmoid", True, 0.0, 1e-20, 2.5, 8, 4), Rule(8, "softmax", True), Rule(4, "none")
    return [a for rule in rules for a in choose_experts(logits, rule, *([vector, vector] if rule.groups > 1 else []))]


@pytest.mark.long
@needs_nvrtc
def test_what_runs_between_layers_and_after_them_compiles() -> None:
    compiled = Compiled()
    with run_with(compiled.maker):
        between_layers(F16, dim=4096)
        cut(151936)
        routed(F16, 512)
    assert len(compiled) == 6
    assert all(".target sm_90" in ptx for ptx in compiled)


@pytest.mark.long
@needs_nvrtc
def test_experts_of_few_rows_compile_for_sm_90() -> None:
    compiled = Compiled()
    with run_with(compiled.maker):
        for kind in EXPERTS:
            compute_both(kind, F16)
    assert len(compiled) == 2 * len(EXPERTS)
    assert all(".target sm_90" in ptx for ptx in compiled)


def test_no_kernel_is_left_out() -> None:
    """Compare the kernels that these tests compile with those in the Metal files."""
    launched = set()

    def maker(*, name: str, **_: object):  # type: ignore[no-untyped-def]
        launched.add(name)
        return lambda *, output_shapes, output_dtypes, **_: [mx.zeros(*made) for made in zip(output_shapes, output_dtypes, strict=True)]

    with run_with(maker):
        launch_everything(8, 4, F16)
        for index in range(len(PRODUCTS)):
            multiply(index)
        matrix("mxfp4", 16, 512, BF16).times(rows_of_x(1, 512, BF16))
        block_dequantize(matrix("Q4_0", 16, 512, BF16).arrays[0], "Q4_0", F16)
        between_layers()
        cut()
        routed()
        for kind in EXPERTS:
            compute_both(kind)
    texts = [file.read_text(encoding="utf-8") for file in ROOT.rglob("*.metal")]
    assert launched == {name for text in texts for name in re.findall(r"^//: kernel (\w+)", text, re.MULTILINE)}


@needs_emulator
def test_what_runs_between_layers_and_after_them_is_that_of_the_emulator() -> None:
    with emulated():
        expected = [*between_layers(), cut(), *routed()]
    with run_with(cuda_cpu.maker):
        found = [*between_layers(), cut(), *routed()]
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(to_float(ours), to_float(theirs))


@needs_emulator
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_as_translated_are_those_of_the_emulator(kind: str) -> None:
    with emulated():
        expected = compute_both(kind)
    with run_with(cuda_cpu.maker):
        found = compute_both(kind)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(to_float(ours), to_float(theirs))


def assert_close(scene: Scene | PrefillScene) -> None:
    """On the CPU, the translated source is as close to float64 as the Metal source must be."""
    with run_with(cuda_cpu.maker):
        ours = to_float(scene.run()) - scene.expected()
    theirs = scene.stock() - scene.expected()
    assert np.abs(ours).max() <= 1.5 * np.abs(theirs).max() + 2.0**-22


@pytest.mark.long
@needs_emulator
@pytest.mark.parametrize(
    "scene",
    [
        PrefillScene(((120, 10), (0, 3)), 4, 8, kv_heads=1, first16=True),
        PrefillScene(((70, 30),), 5, 3, 80, 96, 3, 1, F16, window=40, softcap=2.0, sinks=True),
        PrefillScene(((70, 20),), 16, 2, 512, 64, 1, 1, BF16),
        Scene(((1, 300), (2, 66)), 4, 4, heads=4, sinks=True, first=True),
        Scene(((1, 3000),), 3, 16, dtype=F16, cores=40, window=2000),
        Scene(((8, 72), (1, 1)), 8, 6, dim=128, heads=8, kv_heads=1, dtype=BF16, softcap=5.0),
    ],
    ids=["prefill", "prefill with everything", "prefill of wide heads", "decode", "decode in parts", "decode of many queries"],
)
def test_attention_as_translated_is_right(scene: Scene | PrefillScene) -> None:
    assert_close(scene)


@needs_emulator
@pytest.mark.parametrize("bits", [5, 8])
def test_sealing_as_translated_is_right_to_the_bit(bits: int) -> None:
    pages = np.random.default_rng(bits).normal(size=(2, 3, 64, 96)).astype(np.float32)
    pages = to_float(mx.array(pages).astype(F16))
    with run_with(cuda_cpu.maker):
        keys, values = seal_keys(mx.array(pages).astype(F16), bits), seal_values(mx.array(pages).astype(F16), bits)
    for found, expected in ((keys, sealed_pages.seal_keys(pages, bits)[0]), (values, sealed_pages.seal_values(pages, bits, 48)[0])):
        assert all(np.array_equal(np.array(a), e) for a, e in zip(found, expected, strict=True))


@needs_emulator
def test_appending_as_translated_is_right() -> None:
    scene = AppendScene(((1, 2, 5),), ((1, 2, 5),), dim=80, value_dim=64, dtype=F16, norms="qk", dims=40)
    with run_with(cuda_cpu.maker):
        found = scene.run()
    for got, expected in zip(found, scene.expected(), strict=True):
        assert np.abs(to_float(got) - expected).max() <= 2.0**-10 * np.abs(expected).max()


@needs_emulator
def test_unpacking_as_translated_is_right_to_the_bit() -> None:
    scene = PrefillScene(((70, 130),), 5, 3, 80, 64, dtype=BF16, first16=True)
    with run_with(cuda_cpu.maker):
        found = scene.unseal()
    for got, expected in zip(found, scene.unsealed(), strict=True):
        assert np.array_equal(to_float(got), to_float(expected), equal_nan=True)


@needs_emulator
@pytest.mark.parametrize(("kind", "rows"), [("4/64", 3), ("3/32", 8), ("mxfp4", 2), ("Q5_K", 1), ("Q6_K", 12)])
def test_products_as_translated_are_right(kind: str, rows: int) -> None:
    weights, x = matrix(kind, 19, 512, F16), rows_of_x(rows, 512, F16)
    with run_with(cuda_cpu.maker):
        weights.check(x, weights.times(x))


@needs_emulator
def test_threads_that_wait_in_different_places_are_told() -> None:
    kernel = cuda_cpu.maker(
        name="stuck", input_names=["x"], output_names=["out"], source="if (thread_index_in_simdgroup < 8) out[0] = simd_sum(x[0]);"
    )
    with pytest.raises(RuntimeError, match="different places"):
        kernel(inputs=[mx.zeros(9)], output_shapes=[(1,)], output_dtypes=[F32], grid=(32, 1, 1), threadgroup=(32, 1, 1))
