"""The parameters that a kernel gets are those that MLX gives it."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.emulator.signature import ATTRIBUTES, TYPES

EVERY_ATTRIBUTE = "".join(f"uint used{i} = uint(sizeof({name}));\n" for i, name in enumerate(ATTRIBUTES))


def test_every_attribute_and_kind_of_input() -> None:
    source = "out[0] = q[0] + k[0] * scale + q_shape[0] + kq_strides[1] + k_ndim;\n" + EVERY_ATTRIBUTE
    kernel = emulator.metal_kernel("every", ["q", "k", "kq", "scale"], ["out", "more"], source)
    inputs = [mx.zeros((3, 9)), mx.zeros((7,), mx.bfloat16), mx.zeros((2, 4), mx.uint32), mx.array(0.5)]
    template = [("T", mx.float16), ("D", 128), ("NEGATIVE", -1), ("FLAG", True)]
    assert emulator.compare_signature(kernel, inputs, output_dtypes=[mx.float32, mx.int8], template=template) == []


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
def test_every_dtype(dtype: mx.Dtype) -> None:
    kernel = emulator.metal_kernel("copy", ["x"], ["out"], "out[0] = x[0];")
    assert emulator.compare_signature(kernel, [mx.zeros((9,), dtype)], output_dtypes=[dtype]) == []


def test_atomic_outputs() -> None:
    kernel = emulator.metal_kernel("add", ["x"], ["out"], "out[0];", atomic_outputs=True)
    assert emulator.compare_signature(kernel, [mx.zeros((9,))], output_dtypes=[mx.float32]) == []


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TYPES, mx.float32, "float32_t")
    kernel = emulator.metal_kernel("copy", ["x"], ["out"], "out[0] = x[0];")
    differences = emulator.compare_signature(kernel, [mx.zeros((9,))], output_dtypes=[mx.float32])
    assert len(differences) == 2
    assert "MLX has const device float* x" in differences[0]
