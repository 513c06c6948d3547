"""Pipes, devices and folders in place of a model's files are refused at once, and so are files of excessive size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer.errors import MLXInferError
from mlxinfer.loading.files import read_json
from mlxinfer.loading.find.catalog import describe
from mlxinfer.loading.gguf.reader import GGUFFile
from mlxinfer.loading.safetensors import SafetensorsFile
from mlxinfer.tokenizer.config_files import read_bytes
from mlxinfer.tokenizer.config_files import read_json as read_tokenizer_json
from mlxinfer.tokenizer.sentencepiece_library import read_sentencepiece_model
from mlxinfer.util.plain_file import open_plain, read_plain


def read_sentencepiece(path: Path) -> None:
    read_sentencepiece_model(path, {}, {})


READERS = [read_json, SafetensorsFile, GGUFFile, read_tokenizer_json, read_bytes, read_sentencepiece]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: f"{reader.__module__}.{reader.__name__}")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, reader, kind) -> None:
    path = tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(path)  # it has no writer
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(MLXInferError, match=r"not a regular file|Is a directory"):
        reader(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors", "generation_config.json"])
def test_a_directory_with_a_pipe_among_its_files(tmp_path: Path, name: str) -> None:
    made = tiny_directory(tmp_path)
    (made / name).unlink(missing_ok=True)
    os.mkfifo(made / name)
    try:
        describe(made)
    except MLXInferError as error:
        assert name in str(error)  # noqa: PT017 (others are not read for a description)


def test_a_file_larger_than_any_of_its_kind_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 1 MB"):
        read_plain(path, 1 << 20)
    with open_plain(path) as file:
        assert file.read(3) == b"\0\0\0"
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "missing")
