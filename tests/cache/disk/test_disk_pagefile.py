"""Whatever a file became, it is either what was written or not believed."""

import json
import os
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.disk_entries import LAYOUT, content, digest, entry, path_of
from support.processes.examples import examples

from mlxinfer.cache.disk.page_dir import PageDir
from mlxinfer.cache.disk.pagefile import DataLayout, Tensor, parsed

ONE = entry(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = PageDir(tmp_path_factory.mktemp("disk"), 10**9)
    folder.prepare()
    return folder


@pytest.fixture
def written(folder):
    """The path of a file that was just written."""
    assert folder.write(ONE, content(ONE))
    return path_of(folder.directory, ONE)


def believed(folder, one=ONE):
    data = np.empty(one.layout.nbytes, np.uint8)
    if folder.read(one, data):
        return data
    assert not os.path.lexists(path_of(folder.directory, one))
    return None


@pytest.mark.smoke
def test_what_is_written_is_read(folder, written):
    assert np.array_equal(believed(folder), content(ONE))


def test_it_is_a_safetensors_file(written):
    arrays, about = mx.load(str(written), return_metadata=True)
    data = content(ONE)
    assert {n: (a.dtype, a.shape) for n, a in arrays.items()} == {
        "layers.0.0": (mx.float32, (2, 3, 4)),
        "layers.0.1": (mx.bfloat16, (2, 5)),
        "layers.1.0": (mx.uint32, (3,)),
    }
    assert np.array_equal(np.asarray(arrays["layers.1.0"]), data[-12:].view(np.uint32))
    assert np.array_equal(np.asarray(arrays["layers.0.1"].view(mx.uint16)).ravel(), data[96:116].view(np.uint16))
    assert about["root"] == ONE.root.hex()
    assert about["parent"] == digest(0).hex()
    assert about["tokens"] == ",".join(map(str, range(1, 65)))


def test_only_the_user_can_read_it(folder, written):
    assert written.stat().st_mode & 0o777 == 0o600
    assert written.parent.stat().st_mode & 0o777 == 0o700
    assert folder.directory.stat().st_mode & 0o777 == 0o700


@settings(max_examples=examples(300))
@given(st.data())
def test_a_changed_byte_anywhere(folder, data):
    folder.write(ONE, content(ONE))
    path = path_of(folder.directory, ONE)
    bytes_ = bytearray(path.read_bytes())
    places = data.draw(st.lists(st.integers(0, len(bytes_) - 1), min_size=1, max_size=8, unique=True))
    for place in places:
        bytes_[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes_)
    assert believed(folder) is None


def test_every_truncation(folder, written):
    whole = written.read_bytes()
    for length in range(len(whole)):
        folder.write(ONE, content(ONE))
        os.truncate(written, length)
        assert believed(folder) is None, length
    folder.write(ONE, content(ONE))
    written.write_bytes(whole + b"\0")
    assert believed(folder) is None
    written.parent.mkdir(exist_ok=True)
    written.write_bytes(whole)
    assert believed(folder) is not None


@settings(max_examples=examples(100))
@given(st.binary(max_size=600))
def test_foreign_bytes(folder, foreign):
    folder.write(ONE, content(ONE))
    path_of(folder.directory, ONE).write_bytes(foreign)
    assert believed(folder) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, root=digest(9)),
        replace(ONE, parent=digest(9)),
        replace(ONE, digest=digest(9)),
        replace(ONE, tokens=(*range(1, 64), 0)),
        replace(ONE, part="window7"),
        replace(ONE, layout=DataLayout([*LAYOUT.tensors[:2], Tensor("layers.1.0", "F32", (3,))])),
        replace(ONE, layout=DataLayout([*LAYOUT.tensors[:2], Tensor("layers.1.1", "U32", (3,))])),
        replace(ONE, layout=DataLayout([Tensor("layers.0.0", "F32", (3, 2, 4)), *LAYOUT.tensors[1:]])),
    ],
    ids=["root", "parent", "digest", "tokens", "part", "dtype", "name", "shape"],
)
def test_a_good_file_in_the_place_of_another(folder, written, other):
    place = path_of(folder.directory, other)
    place.parent.mkdir(exist_ok=True)
    os.replace(written, place)
    assert believed(folder, other) is None


def test_a_file_of_another_version(folder, monkeypatch):
    monkeypatch.setattr("mlxinfer.cache.disk.pagefile.VERSION", "mlxinfer prefix page 0")
    folder.write(ONE, content(ONE))
    monkeypatch.undo()
    assert believed(folder) is None


def test_what_is_no_file(folder, written, tmp_path):
    for make in (os.mkfifo, lambda path: os.symlink(tmp_path / "elsewhere", path)):
        written.unlink()
        make(written)
        assert believed(folder) is None
        folder.write(ONE, content(ONE))
    elsewhere = tmp_path / "elsewhere"
    os.replace(written, elsewhere)
    os.symlink(elsewhere, written)
    assert believed(folder) is None
    assert elsewhere.exists()
    os.makedirs(written)
    assert not folder.read(ONE, np.empty(LAYOUT.nbytes, np.uint8))
    written.rmdir()


@given(st.text(max_size=100))
def test_other_names_are_none_of_ours(text):
    assert parsed(text) is None


def test_names_of_ours():
    name = entry(3, part="state17").file
    assert parsed(str(name)) == name
    assert parsed(str(name) + "\n") is None
    assert parsed(str(name).upper()) is None


def test_the_header_is_readable_json(written):
    raw = written.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length])["layers.1.0"] == {"dtype": "U32", "shape": [3], "data_offsets": [116, 128]}
