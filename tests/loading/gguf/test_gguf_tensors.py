from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.errors import UnsupportedModelError, WeightsError
from mlxinfer.loading.gguf import tensors
from mlxinfer.loading.gguf.reader import TensorInfo
from mlxinfer.loading.gguf.tensors import dequantize as our_dequantize
from mlxinfer.loading.gguf.tensors import stored
from mlxinfer.loading.gguf.types import TENSOR_TYPES, TensorType, tensor_type
from mlxinfer.nn.weights import Dense, Matrix, Quantized

PACKED = {
    "Q4_0": (4, 32, "affine"),
    "Q4_1": (4, 32, "affine"),
    "Q8_0": (8, 32, "affine"),
    "MXFP4": (4, 32, "mxfp4"),
    "NVFP4": (4, 16, "nvfp4"),
}
PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
WITHOUT_DECODER = {"Q8_1", "Q8_K", "Q1_0", "Q2_0"}
KINDS = [tensor_type(int(kind), "t", Path("t.gguf")) for kind in GGML_QUANT_SIZES]


def info_of(kind: TensorType, *shape: int) -> TensorInfo:
    return TensorInfo("t", shape, kind, 0, int(np.prod(shape)) // kind.block * kind.block_bytes)


def decode(info: TensorInfo, data: np.ndarray) -> Matrix:
    """Decode in pieces of as many rows as a file is read in."""
    rows = data.reshape(int(np.prod(info.shape[:-1])), -1)
    step = tensors.rows_at_a_time(info)
    return tensors.decode(info, [rows[start : start + step] for start in range(0, len(rows), step)])


def random_bytes(kind: TensorType, *shape: int, seed: int = 0) -> tuple[TensorInfo, np.ndarray]:
    """Any bytes are a tensor, except for the NaN scale of MXFP4 and NVFP4."""
    info = info_of(kind, *shape)
    high = 255 if kind.name in ("MXFP4", "NVFP4") else 256
    return info, np.random.default_rng(seed).integers(0, high, info.nbytes, dtype=np.uint8)


def values(matrix: Matrix) -> np.ndarray:
    return np.array(matrix.dequantize(mx.float32) if isinstance(matrix, Quantized) else matrix.weight.astype(mx.float32))


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.dtype == theirs.dtype and np.array_equal(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name not in WITHOUT_DECODER | PLAIN.keys()], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1)], ids=["matrix", "experts"])
def test_numbers_are_those_of_the_gguf_package(kind: TensorType, shape: tuple[int, ...]) -> None:
    info, data = random_bytes(kind, *shape[:-1], shape[-1] * kind.block)
    rows = data.reshape(*shape[:-1], -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = dequantize(rows, GGMLQuantizationType(kind.id))
    matrix = decode(info, data)
    assert matrix.shape == info.shape
    assert same(values(matrix), expected)
    if kind.name in PACKED:
        assert isinstance(matrix, Quantized)
        assert (matrix.format.bits, matrix.format.group_size, matrix.format.mode) == PACKED[kind.name]
        assert stored(info) == matrix.format
    else:
        assert isinstance(matrix, Dense)
        assert stored(info) == matrix.weight.dtype == (mx.bfloat16 if kind.name == "BF16" else mx.float32)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_numbers_keep_their_type(name: str) -> None:
    kind = next(k for k in KINDS if k.name == name)
    numbers = np.array([[1, -2, 3], [4, 5, -128]], PLAIN[name])
    info = info_of(kind, 2, 3)
    matrix = decode(info, numbers.reshape(-1).view(np.uint8))
    assert isinstance(matrix, Dense)
    expected = "float32" if name == "F64" else numbers.dtype.name
    assert str(matrix.weight.dtype) == f"mlx.core.{expected}"
    assert stored(info) == matrix.weight.dtype
    assert np.array_equal(np.array(matrix.weight), numbers)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name in ("Q8_0", "MXFP4", "Q5_0", "F16")], ids=lambda kind: kind.name)
def test_a_vector_is_never_packed(kind: TensorType) -> None:
    info, data = random_bytes(kind, 64)
    matrix = decode(info, data)
    assert isinstance(matrix, Dense)
    with np.errstate(all="ignore"):
        assert same(values(matrix), dequantize(data, GGMLQuantizationType(kind.id)))


def test_q8_k_q8_1_and_the_one_bit_type() -> None:
    codes = np.arange(-128, 128, dtype=np.int8)
    q8_k = np.float32(0.37).tobytes() + codes.tobytes() + bytes(32)
    q8_1 = np.array([0.5, 9], "<f2").tobytes() + codes[:32].tobytes()
    wide_q8_1 = np.array([0.37, 9], "<f4").tobytes() + codes[:32].tobytes()
    q1_0 = np.array([0.5], "<f2").tobytes() + bytes([0b00000001] + [0] * 15)
    q2_0 = np.array([0.5], "<f2").tobytes() + bytes([0b11100100] + [0] * 15)
    assert same(decoded("Q8_K", 256, q8_k), np.float32(0.37) * codes.astype(np.float32))
    assert same(decoded("Q8_1", 32, q8_1), np.float32(0.5) * codes[:32].astype(np.float32))
    assert same(decoded("Q8_1", 32, wide_q8_1), np.float32(0.37) * codes[:32].astype(np.float32))
    assert decoded("Q1_0", 128, q1_0).tolist() == [0.5] + [-0.5] * 127
    assert decoded("Q2_0", 64, q2_0).tolist() == [-0.5, 0, 0.5, 1.0] + [-0.5] * 60


def decoded(name: str, block: int, data: bytes) -> np.ndarray:
    blocks = np.frombuffer(data, np.uint8)[None]
    return our_dequantize(TensorType(0, name, block, len(data)), blocks)[0]


def test_a_type_without_a_decoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.quants, "_type_traits", {})
    with pytest.raises(UnsupportedModelError, match="type Q6_K cannot be decoded"):
        our_dequantize(TensorType(14, "Q6_K", 256, 210), np.zeros((1, 210), np.uint8))


def test_the_table_is_that_of_the_gguf_package() -> None:
    known = {int(kind): TensorType(int(kind), kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {number: kind for number, kind in TENSOR_TYPES.items() if number in known} == known


def test_a_type_that_only_the_gguf_package_knows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    q4_0 = TENSOR_TYPES[2]
    monkeypatch.delitem(TENSOR_TYPES, 2)
    assert tensor_type(2, "t", Path("t.gguf")) == q4_0


def test_every_type_of_the_gguf_package_is_read() -> None:
    for kind in KINDS:
        info, data = random_bytes(kind, 1, kind.block)
        assert decode(info, data).shape == (1, kind.block)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_a_scale_that_is_no_number_is_an_error(name: str) -> None:
    info, data = random_bytes(next(k for k in KINDS if k.name == name), 2, 64)
    data[0] = 255
    with pytest.raises(WeightsError, match="tensor t: a scale is not a number"):
        decode(info, data)


@pytest.mark.parametrize("name", ["Q5_0", "Q4_K", "IQ4_NL", "F32", "BF16", "Q4_1", "Q8_0", "NVFP4"])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind = next(k for k in KINDS if k.name == name)
    info, data = random_bytes(kind, 5, 3 * kind.block)
    whole = values(decode(info, data))
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 3 * kind.block * 4 * 2)
    assert same(values(decode(info, data)), whole)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32))
def test_packed_matrices_multiply_as_their_numbers(name: str, rows: int, blocks: int, seed: int) -> None:
    kind = next(k for k in KINDS if k.name == name)
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, 32 * blocks)).astype(np.float32)
    data = gguf.quants.quantize(weights, GGMLQuantizationType(kind.id))
    matrix = decode(info_of(kind, rows, 32 * blocks), data.reshape(-1))
    assert isinstance(matrix, Quantized)
    x = mx.array(rng.standard_normal((2, 32 * blocks)).astype(np.float32))
    f = matrix.format
    product = mx.quantized_matmul(x, matrix.weight, matrix.scales, matrix.biases, transpose=True, group_size=f.group_size, bits=f.bits)
    expected = np.array(x) @ dequantize(data, GGMLQuantizationType(kind.id)).T
    assert np.abs(np.array(product) - expected).max() < 1e-4


def test_the_result_owns_its_memory() -> None:
    for kind in KINDS:
        info, data = random_bytes(kind, 2, 2 * kind.block)
        matrix = decode(info, data)
        before = values(matrix)
        data[:] = 1
        assert same(values(matrix), before), kind.name
