"""Packed matrices in a file."""

from __future__ import annotations

import zlib
from pathlib import Path
from threading import Thread

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer import kernels_cpu
from tests.kernels_cpu.test_gguf import BITS, random_blocks

pytestmark = pytest.mark.skipif(kernels_cpu.packed_version() is None, reason="packed matrices cannot be mapped here")

COLUMNS = 512


def packed(kind: str, rows: int) -> kernels_cpu.Packed:
    per_block = 256 if kind.endswith("K") else 32
    return kernels_cpu.pack_gguf(kind, (rows, COLUMNS), [random_blocks(kind, (rows, COLUMNS // per_block), seed=5)])


def written(path: Path, matrix: kernels_cpu.Packed) -> kernels_cpu.WeightFile:
    path.write_bytes(kernels_cpu.preamble(matrix.data.nbytes) + np.array(matrix.data).tobytes())
    with path.open("rb") as file:
        return kernels_cpu.map_weights(file.fileno())


@pytest.mark.parametrize("kind", BITS)
def test_products_are_those_of_memory(tmp_path: Path, kind: str) -> None:
    matrix = packed(kind, 37)
    file = written(tmp_path / "x", matrix)
    mapped = kernels_cpu.mapped_gguf(file, kernels_cpu.ALIGNMENT, kind, (37, COLUMNS))
    del file
    (tmp_path / "x").unlink()
    x = mx.random.normal((3, COLUMNS), key=mx.random.key(0))
    assert mapped.shape == matrix.shape
    assert np.array_equal(np.array(mapped.multiply(x)), np.array(matrix.multiply(x)))


def test_memory_is_replaced_while_others_read_it(tmp_path: Path) -> None:
    rows = 16 * 4096  # 18 MB
    matrix = kernels_cpu.pack_gguf("Q4_0", (rows, COLUMNS), [random_blocks("Q4_0", (rows, COLUMNS // 32), seed=6)])
    file = written(tmp_path / "x", matrix)
    mapped = kernels_cpu.mapped_gguf(file, kernels_cpu.ALIGNMENT, "Q4_0", (rows, COLUMNS))
    x = mx.random.normal((1, COLUMNS), key=mx.random.key(0))
    expected = np.array(matrix.multiply(x))
    thread = Thread(target=kernels_cpu.into_huge_pages, args=(file,))
    thread.start()
    while thread.is_alive():
        assert np.array_equal(np.array(mapped.multiply(x)), expected)
    assert np.array_equal(np.array(mapped.multiply(x)), expected)
    kernels_cpu.into_huge_pages(file)  # once more changes nothing
    assert np.array_equal(np.array(mapped.multiply(x)), expected)


def test_what_is_not_there(tmp_path: Path) -> None:
    matrix = packed("Q8_0", 16)
    file = written(tmp_path / "x", matrix)
    for offset in (0, 63, 65, 128, 1 << 40, (1 << 64) - 64):
        with pytest.raises(ValueError, match="the file has no array"):
            kernels_cpu.mapped_gguf(file, offset, "Q8_0", (16, COLUMNS))
    for kind, shape in (("Q8_0", (32, COLUMNS)), ("Q4_0", (16, COLUMNS)), ("Q8_0", (16, 31)), ("F32", (16, 32)), ("Q8_0", (16,))):
        with pytest.raises(ValueError, match=r"^\[pack\]"):
            kernels_cpu.mapped_gguf(file, 64, kind, shape)
    with pytest.raises(ValueError, match="precision"):
        kernels_cpu.mapped_gguf(file, 64, "Q8_0", (16, COLUMNS), precision="int4")


def test_files_that_cannot_be_mapped(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        kernels_cpu.map_weights(-1)
    (tmp_path / "empty").write_bytes(b"")
    with (tmp_path / "empty").open("rb") as file:
        empty = kernels_cpu.map_weights(file.fileno())
    with pytest.raises(ValueError, match="the file has no array"):
        kernels_cpu.mapped_gguf(empty, 64, "Q8_0", (16, COLUMNS))


def test_the_version_changes_with_what_is_packed() -> None:
    """Copies on disk are made of these bytes: where they change, `kPackedVersion` in layout.h must."""
    checksum = 0
    for kind in sorted(BITS):
        checksum = zlib.crc32(np.array(packed(kind, 37).data).tobytes(), checksum)
    assert (kernels_cpu.packed_version(), checksum) == (1, 2290896067)
