from __future__ import annotations

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.errors import CheckpointError
from mlxinfer.loading.safetensors import DTYPES, SafetensorsFile

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.int32), "c": np.zeros((0, 4), np.float16)}
fuzz = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encode(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def parts() -> tuple[dict, bytes]:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    names = {"float32": "F32", "int32": "I32", "float16": "F16"}
    for name, array in TENSORS.items():
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    return header, data


def read_all(path: Path) -> dict[str, mx.array]:
    file = SafetensorsFile(path)
    try:
        return {name: file.read(name) for name in file.tensors}
    finally:
        file.close()


@pytest.mark.smoke
def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode(*parts()))
    tensors = read_all(path)
    assert tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert np.array_equal(np.array(tensors[name]), array)


def test_agrees_with_mlx_for_every_dtype(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    kinds = [
        mx.float32,
        mx.float16,
        mx.bfloat16,
        mx.int8,
        mx.int16,
        mx.int32,
        mx.int64,
        mx.uint8,
        mx.uint16,
        mx.uint32,
        mx.uint64,
        mx.bool_,
    ]
    arrays = {str(kind): (mx.arange(24).reshape(4, 6) % 7).astype(kind) for kind in kinds}
    mx.save_safetensors(str(path), arrays)
    tensors = read_all(path)
    for name, array in arrays.items():
        assert tensors[name].dtype == array.dtype
        assert mx.array_equal(tensors[name], array).item()


@pytest.mark.parametrize(("dtype", "codes", "values"), [
    ("F8_E4M3", [0x38, 0xB8, 0x7E, 0x01, 0x00], [1.0, -1.0, 448.0, 2.0**-9, 0.0]),
    ("F8_E5M2", [0x3C, 0xBC, 0x7B, 0x01, 0x00], [1.0, -1.0, 57344.0, 2.0**-16, 0.0]),
])  # fmt: skip
def test_8_bit_floats_are_exact(tmp_path: Path, dtype: str, codes: list[int], values: list[float]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode({"a": {"dtype": dtype, "shape": [5], "data_offsets": [0, 5]}}, bytes(codes)))
    array = read_all(path)["a"]
    assert array.dtype == DTYPES[dtype]
    assert array.tolist() == values


def test_doubles_become_single(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode({"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}, struct.pack("<2d", 0.1, -2.5)))
    array = read_all(path)["a"]
    assert array.dtype == mx.float32
    assert np.array_equal(np.array(array), np.array([0.1, -2.5], np.float32))


def test_rows_at_odd_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    data = np.arange(12, dtype=np.float32)
    path.write_bytes(encode(
        {"odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "a": {"dtype": "F32", "shape": [4, 3], "data_offsets": [3, 51]}},
        b"xyz" + data.tobytes(),
    ))  # fmt: skip
    file = SafetensorsFile(path)
    assert np.array_equal(np.array(file.read_rows("a", 1, 3)), data.reshape(4, 3)[1:3])
    file.close()


def test_a_tensor_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode(*parts()))
    tensors = read_all(path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert np.array_equal(np.array(tensors["a"]), TENSORS["a"])


def broken_headers() -> dict[str, bytes]:
    header, data = parts()

    def changed(name: str, key: str, value: object) -> bytes:
        return encode({**header, name: {**header[name], key: value}}, data)

    entry = json.dumps(header["b"])
    return {
        "empty": b"",
        "short": b"\x01\x02",
        "length beyond the file": struct.pack("<Q", 2**63) + b"{}",
        "no object": encode(b"[1, 2]", b""),
        "not json": encode(b'{"a": ', data),
        "not utf-8": encode(b'{"\xff": 1}', data),
        "deep": encode(b'{"a":' * 20000, data),
        "duplicate": encode(f'{{"b": {entry}, "b": {entry}}}'.encode(), data),
        "metadata": encode({**header, "__metadata__": {"a": 1}}, data),
        "no dict": encode({**header, "a": 3}, data),
        "extra key": changed("a", "more", 1),
        "dtype": changed("a", "dtype", "F33"),
        "dtype type": changed("a", "dtype", ["F32"]),
        "dtype size": changed("a", "dtype", "F16"),
        "shape": changed("a", "shape", [2, 4]),
        "negative": changed("a", "shape", [-2, -3]),
        "bool": changed("a", "shape", [True, 6]),
        "float": changed("a", "shape", [2.0, 3]),
        "huge": changed("c", "shape", [0, 2**40]),
        "many dims": changed("a", "shape", [1] * 40 + [6]),
        "reversed": changed("a", "data_offsets", [24, 0]),
        "overlap": changed("b", "data_offsets", [20, 40]),
        "outside": changed("b", "data_offsets", [2**50, 2**50 + 20]),
        "three offsets": changed("b", "data_offsets", [24, 44, 44]),
        "trailing": encode(header, data + b"x"),
        "cut": encode(header, data[:-1]),
    }


@pytest.mark.parametrize("case", broken_headers())
def test_damage_is_one_line(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(broken_headers()[case])
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cut_anywhere(tmp_path: Path) -> None:
    whole = encode(*parts())
    path = tmp_path / "x.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)


def test_no_file_and_no_permission(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="directory"):
        SafetensorsFile(tmp_path)


def succeeds_or_is_refused(path: Path) -> None:
    try:
        tensors, message = read_all(path), ""
    except CheckpointError as error:
        tensors, message = {}, str(error)
    assert "\n" not in message
    assert message or all(isinstance(array, mx.array) for array in tensors.values())


@fuzz
@given(st.binary(max_size=400))
def test_random_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    succeeds_or_is_refused(path)


@fuzz
@given(st.data())
def test_mutated_bytes(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(encode(*parts()))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole))
    succeeds_or_is_refused(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4), max_leaves=5
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F8_E8M0", "C64", "I64", "BOOL", "F8_E5M2"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2).map(sorted) | JSON,
    }
)


@fuzz
@given(st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=3), st.binary(max_size=24))
def test_random_headers(tmp_path: Path, header: dict, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode(header, data))
    succeeds_or_is_refused(path)


@fuzz
@given(st.lists(st.tuples(st.sampled_from(["F32", "BF16", "U8", "F8_E4M3"]), st.lists(st.integers(0, 3), max_size=3)), max_size=4))
def test_valid_files_are_read(tmp_path: Path, kinds: list[tuple[str, list[int]]]) -> None:
    width = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
    header, end = {}, 0
    for number, (dtype, shape) in enumerate(kinds):
        size = int(np.prod(shape, dtype=int)) * width[dtype]
        header[str(number)] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode(header, bytes(end)))
    tensors = read_all(path)
    assert {name: (DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()} == {
        name: (array.dtype, array.shape) for name, array in tensors.items()
    }
