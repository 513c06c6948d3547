from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.errors import CheckpointError, MLXInferError, UnsupportedModelError
from mlxinfer.loading.gguf.reader import GGUFFile
from tests.support.formats.gguf_file import Tensor, Typed, array_tensor, encode, entry, header, string, write

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "small": Typed("i8", -3),
    "wide": Typed("u64", 2**63 + 1),
    "double": Typed("f64", 0.1),
    "flag": True,
    "words": ["a", "", "naïve ☃"],
    "numbers": Typed("array", [1, -2, 3], of="i32"),
    "flags": [True, False],
    "nested": Typed("array", [Typed("array", [1, 2], of="u8"), Typed("array", ["x"], of="string")], of="array"),
}
TENSORS = [
    array_tensor("first", np.arange(6.0).reshape(2, 3)),
    array_tensor("second", np.arange(5.0)),
    array_tensor("point", np.array(7.0)),
]
fuzz = settings(max_examples=examples(300), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def opened(path: Path) -> GGUFFile:
    """Open a file and read every tensor."""
    file = GGUFFile(path)
    for info in file.tensors.values():
        assert len(data_of(file, info.name)) == info.nbytes
    return file


def data_of(file: GGUFFile, name: str, rows: int = 3) -> bytes:
    return b"".join(piece.tobytes() for piece in file.pieces(file.tensors[name], rows))


def test_metadata_of_every_type(tmp_path: Path) -> None:
    found = dict(GGUFFile(write(tmp_path / "x.gguf", METADATA)).metadata)
    assert [a.tolist() if isinstance(a, np.ndarray) else a for a in found.pop("nested")] == [[1, 2], ["x"]]
    assert found.pop("numbers").tolist() == [1, -2, 3]
    assert found.pop("flags").tolist() == [True, False]
    assert found == {
        "general.architecture": "llama",
        "general.alignment": 32,
        "small": -3,
        "wide": 2**63 + 1,
        "double": 0.1,
        "flag": True,
        "words": ["a", "", "naïve ☃"],
    }


@pytest.mark.parametrize("alignment", [1, 8, 32, 256])
def test_tensors_are_where_the_header_says(tmp_path: Path, alignment: int) -> None:
    file = GGUFFile(write(tmp_path / "x.gguf", METADATA | {"general.alignment": alignment}, TENSORS, version=2))
    assert [(info.name, info.shape) for info in file.tensors.values()] == [("first", (2, 3)), ("second", (5,)), ("point", ())]
    for tensor in TENSORS:
        assert data_of(file, tensor.name) == tensor.data


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(7)
    writer.add_token_list(["a", "b", "é"])
    writer.add_token_scores([0.5, -1.0, 0.0])
    rows = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.BF16):
        writer.add_tensor(kind.name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key in ("llama.block_count", "tokenizer.ggml.tokens", "tokenizer.ggml.scores"):
        value = ours.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == theirs.fields[key].contents()
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.type.name == tensor.tensor_type.name
        assert list(info.shape) == list(tensor.shape)[::-1]
        assert data_of(ours, tensor.name) == tensor.data.tobytes()


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    path, whole = tmp_path / "x.gguf", encode(METADATA, TENSORS)
    last = whole.rindex(TENSORS[-1].data) + len(TENSORS[-1].data)
    for size in range(last):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"x\.gguf: [^\n]+$"):
            opened(path)
    path.write_bytes(whole[:last])
    opened(path)


def wrong(tensor: Tensor) -> bytes:
    return encode(METADATA, [tensor])


ARCH = {"general.architecture": "llama"}
CORRUPT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "another format": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "tensors": (header(ARCH, [], counts=(2**60, 1)), "claims 1152921504606846976 tensors"),
    "keys": (header(ARCH, [], counts=(0, 2**63)), "claims 0 tensors and 9223372036854775808 metadata keys"),
    "length of a key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(40), "ends within the name of metadata key 0"),
    "length of a string": (
        header({}, [], counts=(0, 1)) + string("k") + struct.pack("<IQ", 8, 2**40) + bytes(9),
        "ends within metadata key k",
    ),
    "unknown value type": (header({}, [], counts=(0, 1)) + string("k") + struct.pack("<I", 13) + bytes(9), "unknown value type 13"),
    "unknown element type": (
        header({}, [], counts=(0, 1)) + string("k") + struct.pack("<IIQ", 9, 99, 1) + bytes(9),
        "unknown value type 99",
    ),
    "elements": (header({}, [], counts=(0, 1)) + string("k") + struct.pack("<IIQ", 9, 5, 2**62) + bytes(9), "ends within metadata key k"),
    "strings": (header({}, [], counts=(0, 1)) + string("k") + struct.pack("<IIQ", 9, 8, 2**62) + bytes(9), "claims 4611686018427387904"),
    "arrays": (header({}, [], counts=(0, 1)) + string("k") + struct.pack("<IIQ", 9, 9, 2**62) + bytes(9), "claims 4611686018427387904"),
    "deep arrays": (header({}, [], counts=(0, 1)) + string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 99, "nests arrays"),
    "key twice": (header({}, [], counts=(0, 2)) + entry("k", 1) * 2, "metadata key k occurs twice"),
    "key that is no text": (header({}, [], counts=(0, 1)) + entry(b"\xff\xfe", 1), "not UTF-8"),
    "key with a control character": (header({}, [], counts=(0, 1)) + entry("a\nb", 1), "a.nb"),
    "empty key": (header({}, [], counts=(0, 1)) + entry("", 1), "is ''"),
    "string that is no text": (header({}, [], counts=(0, 1)) + entry("k", Typed("string", b"\xff")), "not UTF-8"),
    "token that is no text": (
        header({}, [], counts=(0, 1)) + entry("k", Typed("array", [b"a", b"\xc3"], of="string")),
        "entry 1 of metadata",
    ),
    "dimensions": (wrong(Tensor("t", (1,) * 5, bytes(4))), "has 5 dimensions"),
    "huge shape": (wrong(Tensor("t", (2**62, 2**62), bytes(4))), "tensor t ends at byte"),
    "empty shape": (wrong(Tensor("t", (0, 4), b"")), r"empty shape \[0, 4\]"),
    "block": (wrong(Tensor("t", (2, 33), bytes(100), type=8)), "rows of 33 in tensor t are not whole Q8_0 blocks"),
    "offset beyond": (wrong(Tensor("t", (1,), bytes(4), offset=2**40)), "tensor t ends at byte"),
    "offset between": (wrong(Tensor("t", (1,), bytes(4), offset=4)), "not a multiple of the alignment"),
    "overlap": (encode(METADATA, [TENSORS[0], Tensor("t", (1,), bytes(4), offset=0)]), "tensor t overlaps first"),
    "tensor twice": (encode(METADATA, [TENSORS[0], TENSORS[0]]), "tensor first occurs twice"),
    "alignment": (encode({"general.alignment": 24}), "alignment is not a power"),
    "no alignment": (
        encode({"general.alignment": 32}).replace(struct.pack("<II", 4, 32), bytes((4, 0, 0, 0, 0, 0, 0, 0))),
        "alignment is not a power",
    ),
}


@pytest.mark.parametrize(("data", "message"), CORRUPT.values(), ids=CORRUPT.keys())
def test_corrupt(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(path)
    assert "\n" not in str(caught.value)


UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0) + bytes(20), "version 1"),
    "version 4": (encode(ARCH, version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor type": (wrong(Tensor("t", (1,), bytes(4), type=5)), "tensor t has the unknown type 5"),
    "new tensor type": (wrong(Tensor("t", (1,), bytes(4), type=2**31)), "tensor t has the unknown type 2147483648"),
}


@pytest.mark.parametrize(("data", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_unsupported(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=message):
        opened(path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["missing", "folder"])
def test_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(tmp_path / "x.gguf")


def check_bytes(path: Path, data: bytes) -> None:
    """A file of any bytes is read, or refused with one line."""
    path.write_bytes(data)
    try:
        opened(path).close()
    except MLXInferError as error:
        assert "\n" not in str(error)  # noqa: PT017


@fuzz
@given(st.data())
def test_damage_anywhere(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(encode(METADATA, TENSORS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1)))
        whole[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    check_bytes(tmp_path / "x.gguf", bytes(whole))


@fuzz
@given(st.binary(max_size=400), st.integers(0, 3), st.integers(0, 3))
def test_noise_after_the_counts(tmp_path: Path, noise: bytes, tensors: int, keys: int) -> None:
    check_bytes(tmp_path / "x.gguf", b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + noise)
