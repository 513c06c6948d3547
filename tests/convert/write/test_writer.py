from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.convert.plan.weight_map import StoredPart
from mlxinfer.convert.write.writer import ShardWriter
from mlxinfer.loading.directory import INDEX, SafetensorsCheckpoint

NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8"}


def part(name: str, array: mx.array) -> StoredPart:
    return StoredPart(name, NAMES[array.dtype], tuple(array.shape), array.nbytes)


def opened(directory: Path) -> SafetensorsCheckpoint:
    (directory / "config.json").write_text("{}")
    return SafetensorsCheckpoint(directory)


def test_pieces_of_several_tensors_in_turn(tmp_path: Path) -> None:
    a, b = mx.arange(12, dtype=mx.float32).reshape(4, 3), mx.arange(8).astype(mx.bfloat16).reshape(4, 2)
    writer = ShardWriter(tmp_path, [[part("a", a), part("b", b)]])
    for row in range(4):
        writer.append(part("a", a), a[row : row + 1])
        writer.append(part("b", b), b[row : row + 1])
    writer.finish(20)
    checkpoint = opened(tmp_path)
    assert mx.array_equal(checkpoint.read("a").weight, a).item()
    assert mx.array_equal(checkpoint.read("b").weight, b).item()
    read_by_mlx = mx.load(str(tmp_path / "model.safetensors"))
    assert mx.array_equal(read_by_mlx["b"], b).item()


def test_shards(tmp_path: Path) -> None:
    arrays = [mx.full((10,), float(i)) for i in range(5)]
    groups = [[part(f"{i}.x", array), part(f"{i}.y", array)] for i, array in enumerate(arrays)]
    writer = ShardWriter(tmp_path, groups, shard_bytes=170)
    for group, array in zip(groups, arrays, strict=True):
        for piece in group:
            writer.append(piece, array)
    writer.finish(100)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 400, "total_parameters": 100}
    assert index["weight_map"]["0.x"] == index["weight_map"]["1.y"] == "model-00001-of-00003.safetensors"
    checkpoint = opened(tmp_path)
    assert [checkpoint.read(f"{i}.y").weight[0].item() for i in range(5)] == list(range(5))


def test_a_tensor_larger_than_a_shard_has_one_to_itself(tmp_path: Path) -> None:
    small, large = mx.ones((2,)), mx.ones((100,))
    writer = ShardWriter(tmp_path, [[part("a", small)], [part("b", large)], [part("c", small)]], shard_bytes=50)
    for name, array in (("a", small), ("b", large), ("c", small)):
        writer.append(part(name, array), array)
    writer.finish(104)
    assert set(opened(tmp_path).names()) == {"a", "b", "c"}


def test_what_was_planned_must_come(tmp_path: Path) -> None:
    a = mx.ones((4,))
    writer = ShardWriter(tmp_path, [[part("a", a)]])
    writer.append(part("a", a), a[:3])
    with pytest.raises(AssertionError, match="a was not written completely"):
        writer.finish(4)
    with pytest.raises(AssertionError, match="longer than planned"):
        writer.append(part("a", a), a[:2])
    writer.close()


ARRAYS = st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(sorted(NAMES, key=str)))


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ARRAYS, min_size=1, max_size=5), st.integers(1, 200))
def test_any_tensors(tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[list[int], mx.Dtype]], shard_bytes: int) -> None:
    directory = tmp_path_factory.mktemp("any")
    arrays = {f"t{i}": mx.random.randint(0, 9, shape).astype(dtype) for i, (shape, dtype) in enumerate(kinds)}
    writer = ShardWriter(directory, [[part(name, array)] for name, array in arrays.items()], shard_bytes=shard_bytes)
    for name, array in arrays.items():
        writer.append(part(name, array), array)
    writer.finish(1)
    checkpoint = opened(directory)
    for name, array in arrays.items():
        read = checkpoint.read(name).weight
        assert read.dtype == array.dtype
        assert mx.array_equal(read, array).item()
    checkpoint.close()
