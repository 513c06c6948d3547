"""Files of experts: what is written is read, and stale, damaged or unfinished files are noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import ExpertFileError
from mlxinfer.expert_offload import ExpertFile, ExpertFileWriter, file_format, writer
from mlxinfer.expert_offload.file_format import expert_bytes
from mlxinfer.util.cache_files import is_checked
from mlxinfer.util.uncached_file import PAGE
from tests.support.formats.expert_files import SOURCE, layer_arrays, write_experts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "experts" / "tiny.experts"


def records(file: ExpertFile, key: str) -> list[bytes]:
    layer = file.layers[key]
    return [os.pread(file.descriptor, layer.expert_bytes, layer.offset + n * layer.stride) for n in range(layer.experts)]


def expected(layer: int, experts: int = 8) -> list[bytes]:
    parts = [expert_bytes(array) for array in layer_arrays(layer, experts).values()]
    return [b"".join(part[n].tobytes() for part in parts) for n in range(experts)]


def test_records_are_the_experts(path: Path) -> None:
    write_experts(path).close()
    file = ExpertFile.open(path, SOURCE)
    assert file is not None
    assert [*file.layers] == ["layers.0", "layers.1"]
    for index, layer in enumerate(file.layers.values()):
        assert layer.meta == {"index": index}
        assert [each.name for each in layer.arrays] == ["gate_up.weight", "gate_up.scales", "down.bias"]
        assert [each.shape for each in layer.arrays] == [(16, 8), (16, 2), (3,)]
        assert layer.offset % PAGE == layer.stride % PAGE == 0
        assert records(file, layer.key) == expected(index)
    file.close()


@pytest.mark.parametrize("array", [mx.arange(24).reshape(4, 3, 2).swapaxes(1, 2), np.arange(24.0).reshape(4, 3, 2).swapaxes(1, 2)])
def test_the_order_of_an_array_in_memory_does_not_matter(path: Path, array: mx.array | np.ndarray) -> None:
    with ExpertFileWriter(path, SOURCE) as writer:
        writer.add("layer", {"a": array})
        file = writer.finish()
    assert b"".join(records(file, "layer")) == np.ascontiguousarray(np.array(array)).tobytes()
    file.close()


def test_a_file_of_another_source_is_not_opened(path: Path) -> None:
    write_experts(path).close()
    assert ExpertFile.open(path, {**SOURCE, "layout": 2}) is None
    assert ExpertFile.open(path.with_name("absent.experts"), SOURCE) is None
    assert ExpertFile.open(path.parent, SOURCE) is None


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda whole: whole[:-1],
    "cut page": lambda whole: whole[:-PAGE],
    "longer": lambda whole: whole + bytes(PAGE),
    "empty": lambda whole: b"",
    "text": lambda whole: b"hello",
    "header": lambda whole: _changed(whole, 9),
    "head": lambda whole: _changed(whole, PAGE + 40),
    "record": lambda whole: _changed(whole, 2 * PAGE + 5),
}


def _changed(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_not_opened_and_made_again(path: Path, damage: str) -> None:
    write_experts(path).close()
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    assert ExpertFile.open(path, SOURCE) is None
    write_experts(path).close()
    assert path.read_bytes() == whole


def test_checksums_are_verified_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_experts(path).close()
    assert is_checked(path)
    path.with_suffix(".checked").unlink()
    verified: list[int] = []
    real = file_format.checksum_at
    monkeypatch.setattr(file_format, "checksum_at", lambda *given: verified.append(1) or real(*given))  # type: ignore[func-returns-value]
    for _ in range(2):
        file = ExpertFile.open(path, SOURCE)
        assert file is not None
        file.close()
    assert len(verified) == 16


def interrupted(path: Path) -> None:
    """Write the first layer only."""
    with ExpertFileWriter(path, SOURCE) as writer:
        writer.add("layers.0", layer_arrays(0, 8), {"index": 0})


def test_an_interrupted_file_is_continued(path: Path) -> None:
    write_experts(path).close()
    whole = path.read_bytes()
    path.unlink()
    interrupted(path)
    part = path.with_suffix(".part")
    with part.open("ab") as file:
        file.write(b"the beginning of a layer")
    assert ExpertFile.open(path, SOURCE) is None
    with ExpertFileWriter(path, SOURCE) as writer:
        assert writer.keys == {"layers.0"}
        writer.add("layers.1", layer_arrays(1, 8), {"index": 1})
        writer.finish().close()
    assert path.read_bytes() == whole
    assert not part.exists()


def test_layers_of_another_source_are_not_continued(path: Path) -> None:
    interrupted(path)
    with ExpertFileWriter(path, {"other": 1}) as writer:
        assert not writer.keys


def test_a_finished_file_needs_no_layers(path: Path) -> None:
    write_experts(path).close()
    before = path.stat().st_ino
    with ExpertFileWriter(path, SOURCE) as writer:
        assert writer.keys == {"layers.0", "layers.1"}
        writer.finish().close()
    assert path.stat().st_ino == before
    assert not path.with_suffix(".part").exists()


def test_arrays_of_a_layer_have_the_same_experts(path: Path) -> None:
    with ExpertFileWriter(path, SOURCE) as writer:
        with pytest.raises(ValueError, match="different numbers of experts"):
            writer.add("layer", {"a": mx.zeros((4, 2)), "b": mx.zeros((5, 2))})
        writer.add("layer", {"a": mx.zeros((4, 2))})
        with pytest.raises(ValueError, match="written already"):
            writer.add("layer", {"a": mx.zeros((4, 2))})


def test_a_disk_without_space_is_refused_before_a_byte_is_written(path: Path) -> None:
    writer = ExpertFileWriter(path, SOURCE, 10**18)
    with pytest.raises(ExpertFileError, match=r"the experts need 1000000000\.0 GB .* set MLXINFER_HOME"), writer:
        pass
    assert not list(path.parent.iterdir())


def test_the_file_that_was_not_used_for_longest_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{name}.experts" for name in "abc"]
    for age, path in enumerate(paths[:2]):
        write_experts(path).close()
        os.utime(path.with_suffix(".checked"), (1e9 + age, 1e9 + age))
    file = ExpertFile.open(paths[0], SOURCE)  # counts as used now
    assert file is not None
    file.close()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=writer._SPARE))
    size = paths[0].stat().st_size
    with ExpertFileWriter(paths[2], SOURCE, size):
        assert [path.exists() for path in paths[:2]] == [True, False]


def test_a_disk_that_becomes_full_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> int:
        raise OSError(28, "No space left on device")

    with ExpertFileWriter(path, SOURCE) as writer:
        writer.add("layers.0", layer_arrays(0, 8))
        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(ExpertFileError, match="No space left on device"):
            writer.add("layers.1", layer_arrays(1, 8))
    assert not list(path.parent.iterdir())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExpertFileError, match="cannot write the experts"), ExpertFileWriter(tmp_path / "file" / "a.experts", SOURCE):
        pass
