"""What Apple's compiler or MLX refuse is refused here, at the user's line; what they take is taken."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import emulator

pytestmark = pytest.mark.emulator

# name: (header, body). The wrong line is the last one of the body, or else of the header.
ADDRESS_SPACE = {
    "local pointer": ("", "const float* p = x + 1;"),
    "parameter": ("inline float f(const float* p) { return p[0]; }", ""),
    "reference parameter": ("inline void f(float& r) { r = 1; }", ""),
    "field": ("struct S { const float* p; };", ""),
    "cast": ("", "out[1] = ((const float*)x)[0];"),
    "matrix in a struct": ("struct S { simdgroup_matrix<float, 8, 8> m; };", ""),
    "matrix in a union": ("union U { float f[2]; simdgroup_float8x8 m; };", ""),
    "matrices in a template": ("template <typename P>\nstruct S { simdgroup_half8x8 m[P::N][2]; };", ""),
    "matrices by another name": (
        "template <typename T> struct D { typedef simdgroup_matrix<T, 8, 8> Matrix; };\n"
        "template <typename P> struct S { typename P::Matrix m[2]; };",
        "",
    ),
    "matrix in braces": (
        "struct S { float f;\nsimdgroup_float8x8 m; }; inline S f() { return S{0, make_filled_simdgroup_matrix<float, 8, 8>(1)}; }",
        "",
    ),
    "lambda": ("", "auto f = [&](float a) { return a * 2; };"),
    "goto": ("", "goto end; end: out[0] = 1;"),
}
# Since Metal 4.1 `this` is in no address space of its own, unless the function says so.
WITHOUT_THREAD = {
    "reference to a member": ("struct S { float v[4]; thread float& at(int i) { return v[i]; } };", ""),
    "pointer to a member": ("struct S { float v[4]; thread float* at() { return v; } };", ""),
    "member as an argument": ("inline void f(thread float& a) { a = 1; }\nstruct S { float v; void g() { f(v); } };", ""),
    "member function that says thread": ("struct S { float v; void f() thread { v = 1; } void g() { f(); } };", ""),
    "constructor that says thread": ("struct S { float v; S() thread { v = 1; } }; struct T { S s; };", "T t;"),
    "default constructor of a struct of matrices": ('#line 1 "metal"\nstruct S { simdgroup_float8x8 m; };\n#line 1 "k.metal"', "S s;"),
}
COMPILE = {
    **WITHOUT_THREAD,
    "threadgroup to device": ("inline float f(const device float* p) { return p[0]; }", "threadgroup float t[4];\nout[1] = f(t);"),
    "dropped in a cast": ("", "auto p = (const thread float*)x;"),
    "writing an input": ("", "x[0] = 1;"),
    "double": ("", "double d = x[0];"),
    "program-scope variable": ("const float table[2] = {1, 2};", ""),
    "new": ("", "thread float* p = new float[2];"),
    "virtual": ("struct S { virtual int f() { return 1; } };", ""),
    "exception": ("", "if (x[0] > 0) throw 1;"),
    "function pointer": ("inline int f(int a) { return a; }", "int (*g)(int) = f;"),
    "variable length": ("", "int n = int(x[0]);\nfloat b[n];"),
    "std": ("", "out[0] = std::max(1, 2);"),
    "printf": ("", 'printf("x");'),
    "threadgroup in a helper": ("inline void f() { threadgroup float t[4]; }", ""),
    "threadgroup with a value": ("", "threadgroup float t = 1.0f;"),
    "components": ("", "float4 v = float4(1, 2, 3);"),
    "narrowing a vector": ("", "half4 h;\nh = float4(1.0f);"),
    "half from bfloat": ("", "bfloat b = bfloat(1.0f);\nhalf h = b;"),
    "max of two types": ("", "out[0] = max(x[0], 1);"),
    "unknown name": ("", "out[0] = y[0];"),
    "too much to exchange": ("struct S { float4 a, b; };", "S s;\nsimd_broadcast(s, 0);"),
}
TAKEN = {
    "functions that say thread": (
        "struct S { float v[4]; thread float& at(int i) thread { return v[i]; } void f() thread { at(1) = 1; } };",
        "S s; s.f(); out[1] = s.at(1);",
    ),
    "matrices in a function": (
        "inline void f(thread simdgroup_float8x8* m) { m[1] = make_filled_simdgroup_matrix<float, 8, 8>(1); }",
        "simdgroup_float8x8 m[2]; f(m); out[1] = m[1].thread_elements()[0];",
    ),
    "auto pointer": ("", "auto p = x + 1; out[1] = p[0];"),
    "space in a template": ("template <typename P> inline float f(P p) { return p[0]; }", "out[1] = f(x);"),
    "thread pointer": ("inline float f(const thread float* p) { return p[0]; }", "float a[2] = {1, 2}; out[1] = f(a);"),
    "device reference": ("inline void f(device float& r) { r = 1; }", "f(out[1]);"),
    "constant table": ("constant float table[2] = {1, 2};", "out[1] = table[1];"),
    "constants": ("constant constexpr int SIZE = 4;", "constexpr int HALF = SIZE / 2; out[1] = HALF;"),
    "methods and copies": ("struct S { float v; void add(float a) { v += a; } };", "S s; s.v = 0; s.add(2); S t = s; out[1] = t.v;"),
    "struct from a function": ("struct S { float v[4]; }; inline S f(float a) { S s; s.v[1] = a; return s; }", "out[1] = f(2).v[1];"),
    "braces": ("", "float4 v = {1, 2, 3, 4}; out[1] = v.y;"),
    "cast of a pointer": ("", "float4 v = *(const device float4*)x; out[1] = v.x;"),
    "reinterpret_cast": ("", "auto p = reinterpret_cast<const device uint*>(x); out[1] = as_type<float>(p[0]);"),
    "if constexpr": ("", "if constexpr (sizeof(int2) == 8) out[1] = 1;"),
    "unrolled": ("", "#pragma clang loop unroll(full)\nfor (int i = 0; i < 4; i++) out[i] = 1;"),
    "includes": (
        "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;",
        "out[1] = metal::precise::exp(x[0]);",
    ),
    "inactive input": ("", "out[1] = x_shape[0];"),
    "struct parameters": (
        "struct P { int a; float b; }; inline float f(const thread P& p, device float* o) { return p.b + o[0]; }",
        "P p{1, 2.0f}; out[1] = f(p, out);",
    ),
}


def run(header: str, body: str) -> list[float]:
    kernel = emulator.metal_kernel("k", ["x"], ["out"], f"{body}\n", header=header)
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(16,)], "output_dtypes": [mx.float32]}
    found: list[float] = kernel(inputs=[mx.ones((16,))], init_value=0, **call)[0].tolist()  # type: ignore[arg-type, assignment]
    return found


@pytest.mark.parametrize(("kind", "name"), [("address space", n) for n in ADDRESS_SPACE] + [("compile", n) for n in COMPILE])
def test_refused(kind: str, name: str) -> None:
    header, body = {**ADDRESS_SPACE, **COMPILE}[name]
    with pytest.raises(emulator.KernelError) as caught:
        run(header, body)
    assert caught.value.kind == kind
    where = ("k.metal", body.count("\n") + 1) if body else ("k.header.metal", header.count("\n") + 1)
    assert (caught.value.file, caught.value.line) == where


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    assert run(*TAKEN[name])[1] != 0


def test_lines_of_the_users_own_files() -> None:
    with pytest.raises(emulator.KernelError, match=r"my/helpers\.metal:41: ") as caught:
        run('#line 40 "my/helpers.metal"\n\ninline float f(const float* p) { return p[0]; }', "")
    assert (caught.value.file, caught.value.line) == ("my/helpers.metal", 41)


def launch(**changes: object) -> None:
    kernel = emulator.metal_kernel("k", ["x"], ["out"], "out[thread_position_in_grid.x] = x[0];")
    call: dict[str, object] = {"inputs": [mx.ones((16,))], "grid": (16, 1, 1), "threadgroup": (16, 1, 1)}
    kernel(**{**call, "output_shapes": [(16,)], "output_dtypes": [mx.float32], **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": []}, "0 inputs for x"),
        ({"output_shapes": []}, "0 output shapes"),
        ({"grid": (0, 1, 1)}, "positive"),
        ({"grid": (4, 4)}, "three"),
        ({"grid": (2048, 32, 1), "threadgroup": (64, 32, 1)}, "2048 threads, at most 1024"),
        ({"output_dtypes": [mx.complex64]}, "not supported"),
    ],
)
def test_launches_that_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(emulator.KernelError, match=message) as caught:
        launch(**changes)
    assert caught.value.kind == "launch"


def test_a_threadgroup_is_no_larger_than_the_grid() -> None:
    launch(grid=(2048, 1, 1), threadgroup=(64, 32, 1), output_shapes=[(2048,)])  # as in MLX: 64 threads, not 2048


def test_more_buffers_than_metal_has() -> None:
    names = [f"x{i}" for i in range(31)]
    kernel = emulator.metal_kernel("k", names, ["out"], "out[0] = x0[0];")
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    with pytest.raises(emulator.KernelError, match="32 buffers with shapes and strides, at most 31"):
        kernel(inputs=[mx.zeros((1,))] * 31, **call)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", [{"mode": "quick"}, {"order": "backward"}])
def test_unknown_settings(setting: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is one of"):
        launch(**setting)


def test_names() -> None:
    with pytest.raises(emulator.KernelError, match="identifier"):
        emulator.metal_kernel("my kernel", ["x"], ["out"], "")
    with pytest.raises(emulator.KernelError, match="no outputs"):
        emulator.metal_kernel("k", ["x"], [], "")


@pytest.mark.parametrize(("size", "fits"), [(8191, True), (8192, False)])
def test_threadgroup_memory(size: int, fits: bool) -> None:
    source = f"threadgroup float large[{size}];\nthreadgroup uchar small[4];\nlarge[0] = x[0]; small[0] = 1;\nout[0] = large[0] + small[0];"
    if fits:
        assert run("", source)[0] == 2
        return
    with pytest.raises(
        emulator.KernelError, match="32772 bytes of threadgroup memory, at most 32768:\n  large: 32768 bytes\n  small: 4"
    ) as caught:
        run("", source)
    assert caught.value.kind == "threadgroup memory"


@pytest.mark.parametrize("mode", emulator.MODES)
def test_simd_operations_need_a_whole_simdgroup(mode: str) -> None:
    kernel = emulator.metal_kernel("k", ["x"], ["out"], "uint i = thread_position_in_grid.x;\nout[i] = simd_sum(x[i]);")

    def call(threads: int) -> mx.array:
        shapes = {"output_shapes": [(threads,)], "output_dtypes": [mx.float32]}
        return kernel(inputs=[mx.ones((threads,))], grid=(threads, 1, 1), threadgroup=(64, 1, 1), mode=mode, **shapes)[0]  # type: ignore[arg-type]

    assert call(128).tolist() == [32.0] * 128
    for threads in (16, 48, 96 + 1):
        with pytest.raises(emulator.KernelError) as caught:
            call(threads)
        assert (caught.value.kind, caught.value.line) == ("partial simdgroup", 2)
