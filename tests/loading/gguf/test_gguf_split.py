from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlxinfer.errors import CheckpointError, ModelNotFoundError
from mlxinfer.loading.gguf.files import GGUFFiles, part_paths
from tests.support.formats.gguf_file import Typed, array_tensor, write

TENSORS = {name: np.arange(4.0) + index for index, name in enumerate(("a", "b", "c"))}


def keys(number: int, **other: int) -> dict[str, Typed]:
    values = {"no": number, "count": 3, "tensors.count": 3} | other
    return {f"split.{key.replace('_', '.')}": Typed("i32" if key == "tensors.count" else "u16", value) for key, value in values.items()}


def write_parts(folder: Path) -> list[Path]:
    """Write parts as `llama-gguf-split` does, with the metadata in the first."""
    paths = []
    for number, (name, values) in enumerate(TENSORS.items()):
        metadata = ({"general.architecture": "llama"} if number == 0 else {}) | keys(number)
        paths.append(write(folder / f"m-{number + 1:05}-of-00003.gguf", metadata, [array_tensor(name, values)]))
    return paths


@pytest.mark.parametrize("part", [0, 1, 2])
def test_any_part_opens_the_model(tmp_path: Path, part: int) -> None:
    files = GGUFFiles(write_parts(tmp_path)[part])
    assert files.metadata["general.architecture"] == "llama"
    for name, values in TENSORS.items():
        assert files.floats(name) == values.tolist()
    files.close()


def test_one_file() -> None:
    assert part_paths(Path(__file__)) == [Path(__file__)]


def lose(paths: list[Path]) -> None:
    paths[1].unlink()


def swap(paths: list[Path]) -> None:
    first, second = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(second)
    paths[2].write_bytes(first)


def repeat(paths: list[Path]) -> None:
    write(paths[2], keys(2), [array_tensor("a", TENSORS["a"])])


def shorten(paths: list[Path]) -> None:
    write(paths[2], keys(2), [])


def mix(paths: list[Path]) -> None:
    write(paths[2], keys(2, count=4), [array_tensor("c", TENSORS["c"])])


def cut(paths: list[Path]) -> None:
    paths[2].write_bytes(paths[2].read_bytes()[:-20])


def rename(paths: list[Path]) -> None:
    paths[0].rename(paths[0].with_name("m.gguf"))


@pytest.mark.parametrize(
    ("damage", "opened", "kind", "message"),
    [
        (lose, "m-00001-of-00003.gguf", ModelNotFoundError, "m-00002-of-00003.gguf: no such file, one of the 3 parts"),
        (swap, "m-00001-of-00003.gguf", CheckpointError, "m-00002-of-00003.gguf: does not hold part 2 of 3"),
        (repeat, "m-00001-of-00003.gguf", CheckpointError, "tensor a is also in m-00001-of-00003.gguf"),
        (shorten, "m-00001-of-00003.gguf", CheckpointError, "hold 2 tensors, their header says 3"),
        (mix, "m-00003-of-00003.gguf", CheckpointError, "m-00003-of-00003.gguf: does not hold part 3 of 3"),
        (cut, "m-00001-of-00003.gguf", CheckpointError, "m-00003-of-00003.gguf: tensor c ends at byte"),
        (rename, "m.gguf", CheckpointError, "one of 3 parts"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damaged_splits(tmp_path: Path, damage: Callable[[list[Path]], None], opened: str, kind: type[Exception], message: str) -> None:
    damage(write_parts(tmp_path))
    with pytest.raises(kind, match=message):
        GGUFFiles(tmp_path / opened)


@pytest.mark.parametrize(
    ("name", "message"),
    [("x.gguf", "x.gguf: no such file$"), ("m-00004-of-00003.gguf", "makes no sense"), ("m-00000-of-00000.gguf", "makes no sense")],
)
def test_no_such_file(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises((ModelNotFoundError, CheckpointError), match=message):
        GGUFFiles(tmp_path / name)


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(ModelNotFoundError, match="is a folder"):
        GGUFFiles(tmp_path / "x.gguf")
