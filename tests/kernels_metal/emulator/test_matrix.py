"""simdgroup_matrix: Apple's layout, loads and stores from both memories, products."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.kernels_metal import emulator

pytestmark = pytest.mark.emulator

# C = A B, a simdgroup for each tile of 8x8; B is given transposed, and goes through threadgroup memory.
PRODUCT = """
threadgroup T tile[8 * 8];
const uint row = threadgroup_position_in_grid.y * 8, column = threadgroup_position_in_grid.x * 8;
const uint lane = thread_index_in_simdgroup;
simdgroup_matrix<float, 8, 8> c = simdgroup_matrix<float, 8, 8>(0);
for (int k = 0; k < K; k += 8) {
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_load(left, a, K, ulong2(k, row));
  for (uint i = lane; i < 64; i += 32) tile[i] = b[(column + i / 8) * K + k + i % 8];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(right, tile, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(c, left, right, c);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
simdgroup_store(c, out, N, ulong2(column, row));
"""


def product(a: mx.array, b: mx.array, **call: object) -> mx.array:
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[0]
    kernel = emulator.metal_kernel("product", ["a", "b"], ["out"], PRODUCT)
    template = [("T", a.dtype), ("K", depth), ("N", columns)]
    shapes: dict[str, object] = {"output_shapes": [(rows, columns)], "output_dtypes": [mx.float32], **call}
    grid = (columns // 8 * 32, rows // 8, 1)
    return kernel(inputs=[a, b], template=template, grid=grid, threadgroup=(32, 1, 1), **shapes)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", emulator.MODES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_product(dtype: mx.Dtype, mode: str) -> None:
    mx.random.seed(5)
    a, b = mx.random.normal((16, 24)).astype(dtype), mx.random.normal((32, 24)).astype(dtype)
    exact = np.array(a.astype(mx.float32)).astype(np.float64) @ np.array(b.astype(mx.float32)).T
    out = product(a, b, mode=mode, order="random")
    np.testing.assert_allclose(np.array(out), exact, rtol=1e-5, atol=1e-5)


def run(source: str, *inputs: mx.array, **call: object) -> list[list[float]]:
    kernel = emulator.metal_kernel("k", [f"x{i}" for i in range(len(inputs))], ["out"], source)
    shapes: dict[str, object] = {"output_shapes": [(8, 8)], "output_dtypes": [mx.float32], **call}
    found = kernel(inputs=list(inputs), grid=(32, 1, 1), threadgroup=(32, 1, 1), **shapes)[0]  # type: ignore[arg-type]
    return found.tolist()  # type: ignore[return-value]


def test_elements_of_a_lane() -> None:
    source = """simdgroup_float8x8 m;
m.thread_elements()[0] = thread_index_in_simdgroup;
m.thread_elements()[1] = thread_index_in_simdgroup + 100;
simdgroup_store(m, out, 8);"""
    quarter = np.array([[0, 100, 1, 101], [2, 102, 3, 103], [4, 104, 5, 105], [6, 106, 7, 107]])
    assert run(source) == np.block([[quarter, quarter + 8], [quarter + 16, quarter + 24]]).tolist()


def test_diagonal_and_filled() -> None:
    assert run("simdgroup_float8x8 m = simdgroup_float8x8(3); simdgroup_store(m, out, 8);") == (3 * np.eye(8)).tolist()
    assert run("auto m = make_filled_simdgroup_matrix<float, 8, 8>(3); simdgroup_store(m, out, 8);") == np.full((8, 8), 3).tolist()


def test_transposed_store_and_multiply() -> None:
    a = np.random.default_rng(1).integers(-9, 9, (8, 8)).astype(np.float32)
    source = (
        "simdgroup_float8x8 a, c;\nsimdgroup_load(a, x0, 8);\nsimdgroup_multiply(c, a, a);\nsimdgroup_store(c, out, 8, ulong2(0, 0), true);"
    )
    assert run(source, mx.array(a)) == (a @ a).T.tolist()


def test_a_matrix_beyond_its_buffer() -> None:
    with pytest.raises(emulator.KernelError, match="heap-buffer-overflow") as caught:
        run("simdgroup_float8x8 a;\nsimdgroup_load(a, x0 + 1, 8);\nsimdgroup_store(a, out, 8);", mx.zeros((8, 8)), mode="asan")
    assert (caught.value.kind, caught.value.line) == ("bounds", 2)


@pytest.mark.parametrize("mode", ["tsan", "trace"])
def test_loads_do_not_order_memory(mode: str) -> None:
    missing = PRODUCT.replace("  simdgroup_barrier(mem_flags::mem_threadgroup);\n  simdgroup_load", "  simdgroup_load")
    kernel = emulator.metal_kernel("product", ["a", "b"], ["out"], missing)
    call = {"template": [("T", mx.float32), ("K", 8), ("N", 8)], "output_shapes": [(8, 8)], "output_dtypes": [mx.float32]}
    with pytest.raises(emulator.KernelError) as caught:
        kernel(inputs=[mx.zeros((8, 8))] * 2, grid=(32, 1, 1), threadgroup=(32, 1, 1), mode=mode, **call)  # type: ignore[arg-type]
    assert (caught.value.kind, caught.value.line in (9, 10)) == ("race", True)
