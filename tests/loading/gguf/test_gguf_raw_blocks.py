"""Matrices that stay in their GGUF file until they are packed."""

from __future__ import annotations

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from mlxinfer import kernels_cpu
from mlxinfer.errors import WeightsError
from mlxinfer.kernels_cpu import Packed
from mlxinfer.loading.gguf.files import left_in_file, marked_to_stay
from mlxinfer.loading.gguf.reader import GGUFFile
from mlxinfer.nn.linear import Embedding, JoinedLinear, Linear, multiply
from mlxinfer.nn.moe import ExpertLinear
from mlxinfer.nn.packing import arrays, settle
from mlxinfer.nn.weights import RawBlocks, concat, map_rows, numbers, stack
from tests.support.formats.gguf_file import Tensor, write

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def exact(values: np.ndarray, kind: Kind) -> np.ndarray:
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind).view(np.uint8), kind)


def matrices(path: Path, values: list[np.ndarray], kind: Kind = Kind.Q5_0) -> list[RawBlocks]:
    tensors = [Tensor(f"t{i}", v.shape, gguf.quants.quantize(v, kind).tobytes(), int(kind)) for i, v in enumerate(values)]
    file = GGUFFile(write(path / "x.gguf", {"general.architecture": "llama"}, tensors))
    return [left_in_file(file, marked_to_stay(file.tensors[tensor.name])) for tensor in tensors]


def test_rows_of_several_tensors_in_any_order(tmp_path: Path) -> None:
    values = [random(5, 64), random(1, 64), random(40, 64)]
    joined = concat(matrices(tmp_path, values))
    whole = exact(np.concatenate(values), Kind.Q5_0)
    order = np.random.default_rng(0).permutation(46)[:30]
    picked = map_rows(joined, lambda rows: rows[mx.array(order)])
    assert isinstance(picked, RawBlocks)
    assert picked.shape == (30, 64)
    assert np.array_equal(np.array(numbers(picked)), whole[order])
    for size in (1, 7, 100):
        assert sum(len(piece) for piece in picked.pieces(size)) == 30
        assert max(len(piece) for piece in picked.pieces(size)) <= size
    embedding = Embedding(picked, mx.float32)
    settle(embedding)
    assert isinstance(embedding.matrix, Packed)
    assert np.array_equal(np.array(embedding(mx.arange(30))), whole[order])


def test_nothing_of_the_file_is_among_the_arrays_of_a_model(tmp_path: Path) -> None:
    assert list(arrays(Linear(matrices(tmp_path, [random(4, 32)])[0]))) == []


def test_projections_are_joined_where_they_are_stored_alike(tmp_path: Path) -> None:
    values = [random(48, 64), random(16, 64), random(16, 64, seed=1)]
    q, k = matrices(tmp_path, values[:2])
    (tmp_path / "v").mkdir()
    (v,) = matrices(tmp_path / "v", values[2:], Kind.Q8_0)
    joined = JoinedLinear([Linear(q), Linear(k), Linear(v)], [48, 16, 16])
    assert len(joined.linears) == 2
    settle(joined, precision="float32")
    x = random(3, 64, seed=2)
    for got, value, kind in zip(joined(mx.array(x)), values, (Kind.Q5_0, Kind.Q5_0, Kind.Q8_0), strict=True):
        assert np.abs(np.array(got) - x @ exact(value, kind).T).max() < 1e-4


def test_products_without_packing(tmp_path: Path) -> None:
    value, x = random(24, 64), random(3, 64, seed=1)
    (matrix,) = matrices(tmp_path, [value])
    assert np.abs(np.array(multiply(mx.array(x), matrix)) - x @ exact(value, Kind.Q5_0).T).max() < 1e-4


@pytest.mark.parametrize("packed", [True, False])
def test_experts(tmp_path: Path, packed: bool) -> None:
    values = [random(20, 64, seed=seed) for seed in range(3)]
    linear = ExpertLinear(stack(matrices(tmp_path, values)))
    if packed:
        settle(linear, precision="float32")
    x, chosen = random(4, 1, 64), [2, 0, 1, 2]
    got = np.array(linear(mx.array(x), mx.array(chosen)))
    want = np.einsum("tok,tnk->ton", x, exact(np.stack(values), Kind.Q5_0)[chosen])
    assert np.abs(got - want).max() < 1e-4


def test_different_types_are_not_joined(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="different quantization"):
        concat([*matrices(tmp_path, [random(4, 64)]), *matrices(tmp_path / "b", [random(4, 64)], Kind.Q4_0)])


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    value = random(4, 64)
    value[2, 40] = np.inf
    with np.errstate(all="ignore"):
        (matrix,) = matrices(tmp_path, [value])
        with pytest.raises(WeightsError, match=r"^[^\n]*x\.gguf: t0: a scale is NaN or infinite[^\n]*$"):
            settle(Linear(matrix))
