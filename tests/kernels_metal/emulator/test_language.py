"""Metal's functions compute what numpy computes, in one kernel per family."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.kernels_metal import emulator

pytestmark = pytest.mark.emulator

LANES = np.arange(32)
X = np.random.default_rng(3).standard_normal(32).astype(np.float32)


def run(source: str, inputs: dict[str, mx.array], outputs: int, *, header: str = "", threads: int = 32, **call: object) -> np.ndarray:
    kernel = emulator.metal_kernel("k", list(inputs), ["out"], source, header)
    options: dict[str, object] = {"grid": (threads, 1, 1), "threadgroup": (threads, 1, 1), "output_dtypes": [mx.float32], **call}
    return np.array(kernel(inputs=list(inputs.values()), output_shapes=[(outputs, threads)], **options)[0])  # type: ignore[arg-type]


def write(expressions: list[str], prelude: str = "") -> str:
    rows = "\n".join(f"out[{i} * 32 + lane] = float({expression});" for i, expression in enumerate(expressions))
    return f"const uint lane = thread_index_in_simdgroup;\n{prelude}\n{rows}"


def _quads(x: np.ndarray) -> np.ndarray:
    return np.repeat(x.reshape(8, 4).sum(1), 4)


SIMD = {
    "simd_sum(v)": np.full(32, X.astype(np.float64).sum()),
    "simd_max(v)": np.full(32, X.max()),
    "simd_min(v)": np.full(32, X.min()),
    "simd_product(v)": np.full(32, X.astype(np.float64).prod()),
    "simd_sum(float4(v, lane, 1, 2)).y": np.full(32, 496),
    "simd_and(lane | 64u)": np.full(32, 64),
    "simd_or(lane)": np.full(32, 31),
    "simd_xor(lane)": np.zeros(32),
    "simd_shuffle(v, 31 - lane)": X[::-1],
    "simd_broadcast(v, 5)": np.full(32, X[5]),
    "simd_broadcast_first(v)": np.full(32, X[0]),
    "simd_shuffle_xor(v, 9)": X[LANES ^ 9],
    "simd_shuffle_down(lane, 4)": np.where(LANES < 28, LANES + 4, LANES),
    "simd_shuffle_up(lane, 4)": np.where(LANES >= 4, LANES - 4, LANES),
    "simd_shuffle_rotate_down(lane, 4)": (LANES + 4) % 32,
    "simd_shuffle_rotate_up(lane, 4)": (LANES - 4) % 32,
    "simd_shuffle_and_fill_down(lane, 100 + lane, 4)": np.where(LANES < 28, LANES + 4, 100 + LANES - 28),
    "simd_shuffle_and_fill_up(lane, 100 + lane, 4)": np.where(LANES >= 4, LANES - 4, 100 + LANES + 28),
    "simd_prefix_inclusive_sum(lane)": np.cumsum(LANES),
    "simd_prefix_exclusive_sum(lane)": np.cumsum(LANES) - LANES,
    "simd_prefix_inclusive_product(lane < 2 ? 2.0f : 1.0f)": np.where(LANES == 0, 2, 4),
    "simd_any(lane == 3)": np.ones(32),
    "simd_all(lane < 31)": np.zeros(32),
    "simd_all(lane < 32)": np.ones(32),
    "ulong(simd_ballot(lane == 1 || lane == 3))": np.full(32, 10),
    "simd_is_first()": LANES == 0,
    "quad_sum(lane)": _quads(LANES),
    "quad_max(lane)": LANES | 3,
    "quad_shuffle_xor(lane, 2)": LANES ^ 2,
    "quad_broadcast(lane, 1)": (LANES & ~3) | 1,
}


@pytest.mark.parametrize("mode", emulator.MODES)
def test_simd(mode: str) -> None:
    out = run(write(list(SIMD), "const float v = x[lane];"), {"x": mx.array(X)}, len(SIMD), mode=mode, order="random")
    for row, (expression, expected) in zip(out, SIMD.items(), strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-5, err_msg=expression)


POSITIVE = np.abs(X) + 0.1
MATH = {
    **{
        f"{name}(v)": getattr(np, name)(X)
        for name in ("exp", "exp2", "sin", "cos", "tan", "sinh", "cosh", "tanh", "floor", "ceil", "trunc")
    },
    **{f"{name}(p)": getattr(np, name)(POSITIVE) for name in ("log", "log2", "log10", "sqrt")},
    **{f"metal::{space}::exp2(v)": np.exp2(X) for space in ("fast", "precise")},
    "atan(v)": np.arctan(X),
    "asin(clamp(v, -1.0f, 1.0f))": np.arcsin(np.clip(X, -1, 1)),
    "rsqrt(p)": 1 / np.sqrt(POSITIVE),
    "rint(v * 2)": np.rint(X * 2),
    "round(v)": np.sign(X) * np.floor(np.abs(X) + 0.5),
    "fabs(v)": np.abs(X),
    "abs(v)": np.abs(X),
    "sign(v)": np.sign(X),
    "saturate(v)": np.clip(X, 0, 1),
    "pow(p, 1.5f)": POSITIVE**1.5,
    "atan2(v, p)": np.arctan2(X, POSITIVE),
    "fmod(v, 0.7f)": np.fmod(X, np.float32(0.7)),
    "fma(v, v, p)": X * X + POSITIVE,
    "max(v, 0.0f)": np.maximum(X, 0),
    "min(v, 0.0f)": np.minimum(X, 0),
    "max(NAN, v)": X,
    "min(v, NAN)": X,
    "max3(v, 0.1f, p)": np.maximum(np.maximum(X, np.float32(0.1)), POSITIVE),
    "mix(v, p, 0.25f)": X + (POSITIVE - X) / 4,
    "select(v, p, v < 0)": np.where(X < 0, POSITIVE, X),
    "copysign(p, v)": np.copysign(POSITIVE, X),
    "ldexp(v, 3)": X * 8,
    "isnan(v - v + NAN) && !isnan(v)": np.ones(32),
    "isinf(v * INFINITY) && !isinf(v) && isfinite(v)": np.ones(32),
    "numeric_limits<float>::max()": np.full(32, np.finfo(np.float32).max),
    "exp(half(v))": np.exp(X.astype(np.float16)).astype(np.float16),
    "exp(bfloat(0.5f))": np.full(32, 1.6484375),
    "dot(float4(v), float4(1, 2, 3, 4))": X * 10,
    "length(float2(3 * p, 4 * p))": 5 * POSITIVE,
    "exp(float3(v, 0, 1)).z": np.full(32, np.e),
    "max(float4(v), float4(0.0f)).w": np.maximum(X, 0),
    "clamp(float2(v, 5), 0.0f, 1.0f).y": np.ones(32),
    "select(float2(v), float2(p), float2(v) < float2(0.0f)).x": np.where(X < 0, POSITIVE, X),
    "any(float2(v, 1) > float2(9.0f, 0.5f))": np.ones(32),
    "all(float2(v, 1) > float2(9.0f, 0.5f))": np.zeros(32),
}


@pytest.mark.parametrize("mode", ["fast", "msan"])
def test_math(mode: str) -> None:
    prelude = "const float v = x[lane];\nconst float p = fabs(v) + 0.1f;"
    out = run(write(list(MATH), prelude), {"x": mx.array(X)}, len(MATH), mode=mode)
    for row, (expression, expected) in zip(out, MATH.items(), strict=True):
        np.testing.assert_allclose(row, expected, rtol=2e-6, atol=1e-6, err_msg=expression)


INTEGERS = {
    "popcount(255u << lane)": [bin((255 << n) & 0xFFFFFFFF).count("1") for n in range(32)],
    "clz(1u << lane)": 31 - LANES,
    "ctz(1u << lane)": LANES,
    "clz(0u)": np.full(32, 32),
    "clz(ushort(1))": np.full(32, 15),
    "extract_bits(0x89abcdefu, 4, 8)": np.full(32, 0xDE),
    "extract_bits(-16, 4, 4)": np.full(32, -1),
    "insert_bits(0u, 5u, 3, 4)": np.full(32, 40),
    "reverse_bits(1u) >> 31": np.ones(32),
    "rotate(0x80000001u, 1u)": np.full(32, 3),
    "mulhi(0x80000000u, 6u)": np.full(32, 3),
    "absdiff(lane, 5u)": np.abs(LANES - 5),
    "as_type<uint>(1.0f) >> 16": np.full(32, 0x3F80),
    "as_type<float>(0x40400000u)": np.full(32, 3),
    "as_type<ushort2>(0x00020001u).y": np.full(32, 2),
    "as_type<half2>(0x40003c00u).y": np.full(32, 2),
    "as_type<bfloat>(ushort(0x4040))": np.full(32, 3),
    "uchar(300)": np.full(32, 44),
    "(uint4(1, 2, 3, 4) >> uint4(0, 1, 0, 2)).w": np.ones(32),
    "(float4(1, 2, 3, 4).wzyx).x": np.full(32, 4),
    "float4(float2(1, 2), float2(3, 4)).z": np.full(32, 3),
    "float4(half4(1, 2, 3, 4)).w": np.full(32, 4),
    "half4(float4(1, 2, 3, 2049)).w": np.full(32, 2048),
    "bfloat4(float4(1, 2, 3, 257)).w": np.full(32, 256),
    "(bfloat4(float4(3)) * bfloat4(float4(2))).y": np.full(32, 6),
    "float4(bfloat4(float4(5))).x": np.full(32, 5),
    "uchar4(as_type<uchar4>(0x04030201u)).z": np.full(32, 3),
    "float4(as_type<uchar4>(0x04030201u)).z": np.full(32, 3),
    "uint3(7).z": np.full(32, 7),
    "half(1.0h) / 3.0h": np.full(32, np.float16(1) / np.float16(3)),
    "bfloat(1) + bfloat(0.00390625f)": np.ones(32),
    "vec<float, 4>(9.0f).z": np.full(32, 9),
    "ceildiv(lane, 4u)": (LANES + 3) // 4,
}


def test_integers_and_vectors() -> None:
    out = run(write(list(INTEGERS)), {"x": mx.array(X)}, len(INTEGERS))
    for row, (expression, expected) in zip(out, INTEGERS.items(), strict=True):
        np.testing.assert_array_equal(row, expected, err_msg=expression)


def test_swizzles_are_assigned_to() -> None:
    source = "float4 v = float4(1, 2, 3, 4);\nv.xy = v.zw; v.w = 9;\nout[thread_position_in_grid.x] = v[thread_position_in_grid.x];"
    assert run(source, {"x": mx.array(X)}, 1, threads=4).tolist() == [[3, 4, 3, 9]]


POSITIONS = ["thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid", "threads_per_threadgroup"]


def test_positions_in_a_grid_that_threadgroups_do_not_fill() -> None:
    fields = [f"{name}.{axis}" for name in POSITIONS for axis in "xyz"] + ["dispatch_threads_per_threadgroup.x", "threadgroups_per_grid.x"]
    fields += ["thread_index_in_threadgroup", "simdgroups_per_threadgroup", "threads_per_grid.y"]
    place = "uint3 p = thread_position_in_grid; uint i = (p.z * 3 + p.y) * 5 + p.x;\n"
    source = place + "\n".join(f"out[{k} * 30 + i] = {name};" for k, name in enumerate(fields))
    kernel = emulator.metal_kernel("k", ["x"], ["out"], source)
    call = {"grid": (5, 3, 2), "threadgroup": (4, 2, 1), "output_shapes": [(len(fields), 30)], "output_dtypes": [mx.uint32]}
    out = np.array(kernel(inputs=[mx.zeros((1,))], order="random", **call)[0])  # type: ignore[arg-type]
    z, y, x = (axis.reshape(-1) for axis in np.meshgrid(range(2), range(3), range(5), indexing="ij"))
    width, height = np.where(x < 4, 4, 1), np.where(y < 2, 2, 1)
    expected = [x, y, z, x % 4, y % 2, 0 * z, x // 4, y // 2, z, width, height, 1 + 0 * z, 4 + 0 * x, 2 + 0 * x]
    expected += [y % 2 * width + x % 4, 1 + 0 * x, 3 + 0 * x]
    np.testing.assert_array_equal(out, expected)


ADD = "uint i = thread_position_in_grid.x;\natomic_fetch_add_explicit(&out[i % 4], x[i], memory_order_relaxed);\n"


@pytest.mark.parametrize("mode", emulator.MODES)
def test_atomics(mode: str) -> None:
    kernel = emulator.metal_kernel("add", ["x"], ["out"], ADD, atomic_outputs=True)
    call = {"grid": (256, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(4,)], "init_value": 0, "mode": mode, "order": "random"}
    for dtype in (mx.uint32, mx.float32):
        out = kernel(inputs=[mx.arange(256).astype(dtype)], output_dtypes=[dtype], **call)[0]  # type: ignore[arg-type]
        assert out.tolist() == [sum(range(i, 256, 4)) for i in range(4)]


def test_what_is_not_row_contiguous() -> None:
    source = "uint i = thread_position_in_grid.x;\nout[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];"
    array = mx.arange(40).reshape(5, 8)[:, ::2].T
    for contiguous in (True, False):
        kernel = emulator.metal_kernel("k", ["x"], ["out"], source, ensure_row_contiguous=contiguous)
        call = {"grid": (20, 1, 1), "threadgroup": (20, 1, 1), "output_shapes": [(20,)], "output_dtypes": [mx.int32]}
        out = kernel(inputs=[array], mode="asan", **call)[0]  # type: ignore[arg-type]
        assert out.tolist() == array.reshape(-1).tolist()
