"""A model in one GGUF file, or in several: `name-00001-of-00003.gguf` and its siblings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import kernels_cpu
from ...errors import CheckpointError, ModelNotFoundError
from ...kernels_metal.quantized_matmul.block_formats import BLOCKS
from ...nn.weights import Format, Matrix, RawBlocks, numbers
from .mlx_formats import PACKINGS
from .reader import GGUFFile, TensorInfo
from .tensors import decode, dequantize, rows_at_a_time


def marked_to_stay(info: TensorInfo) -> TensorInfo:
    """Mark a tensor as `kept` if it can be: a matrix of a type that the packer supports."""
    form = kernels_cpu.gguf_types().get(info.type.name)
    if form is None or len(info.shape) < 2:
        return info
    return replace(info, kept=Format(*form, mode=info.type.name))


def marked_to_pack(info: TensorInfo, kinds: Collection[str], blocks: Collection[str] = ()) -> TensorInfo:
    """Mark a tensor for a GPU: as `packed` for these kinds, as `kept` for the kinds that stay in blocks."""
    if len(info.shape) < 2 or info.type.name not in PACKINGS:
        return info
    whole = len(info.shape) == 2 and not _EXPERT.search(info.name) and info.type.name in blocks
    kept = Format(BLOCKS[info.type.name].bits, BLOCKS[info.type.name].group, info.type.name) if whole else None
    return replace(info, packed=info.type.name in kinds, kept=kept)


_EXPERT = re.compile(r"\.ffn_(gate|up|down)\.\d+\.")
"""Names of single experts' matrices, in files that do not join experts. Products of experts support MLX's formats only."""


def left_in_file(file: GGUFFile, info: TensorInfo) -> RawBlocks:
    """The blocks of a tensor that `marked_to_stay` has marked, unread."""
    assert info.kept
    rows = np.arange(info.row_count, dtype=np.int32).reshape(info.shape[:-1])
    return RawBlocks((_Rows(file, info),), (info.row_count,), rows, info.shape[-1], info.kept)


class _Rows:
    """Implements `FileRows`."""

    __slots__ = ("_file", "_info", "_last")

    def __init__(self, file: GGUFFile, info: TensorInfo) -> None:
        self._file, self._info = file, info
        self._last = (0, 0)

    @property
    def name(self) -> str:
        return f"{self._file.path}: {self._info.name}"

    @property
    def tensor(self) -> str:
        return self._info.name

    def read(self, rows: np.ndarray) -> np.ndarray:
        first = int(rows.min())
        count = int(rows.max()) - first + 1
        self._last = first, count
        blocks = self._file.rows(self._info, first, count)
        return blocks if count == len(rows) and (np.diff(rows) == 1).all() else blocks[rows - first]

    def forget(self) -> None:
        self._file.forget(self._info, *self._last)

    def dequantize(self, blocks: np.ndarray) -> np.ndarray:
        return dequantize(self._info.type, blocks.reshape(-1, self._info.type.block_bytes)).reshape(len(blocks), -1)


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"


class GGUFFiles:
    """All files of a model, opened by the path of any of them. `metadata` is that of the first file, which has everything but tensors.

    With `raw_blocks`, matrices that the CPU kernels can multiply stay in their blocks.
    """

    def __init__(self, path: Path, *, raw_blocks: bool = False) -> None:
        self.path = path
        self._files: list[GGUFFile] = []
        try:
            for part in part_paths(path):
                self._files.append(GGUFFile(part))
            self.metadata: dict[str, Any] = self._files[0].metadata
            self._check_parts()
            self._where = self._locate()
            self.written_as = str(self.metadata.get("general.architecture", ""))
            """The architecture's name in the file."""
            self.tensors = {name: file.tensors[name] for name, file in self._where.items()}
            if raw_blocks:
                self.tensors = {name: marked_to_stay(info) for name, info in self.tensors.items()}
        except BaseException:
            self.close()
            raise

    def leave_out(self, keys: Collection[str]) -> tuple[str, ...]:
        """Remove metadata keys of the architecture, each named with or without its prefix. Returns the keys that existed."""
        prefix = f"{self.written_as}."
        found = tuple(key for key in self.metadata if key.startswith(prefix) and not {key, key.removeprefix(prefix)}.isdisjoint(keys))
        self._replace_metadata({key: value for key, value in self.metadata.items() if key not in found})
        return found

    def hold(self, metadata: dict[str, Any], names: Mapping[str, str]) -> None:
        """Replace the metadata, and keep only the tensors of `names`, which maps new names to names in the file."""
        self._replace_metadata(metadata)
        self._where = {name: self._where[old] for name, old in names.items()}
        self.tensors = {name: replace(self.tensors[old], name=name) for name, old in names.items()}

    def _replace_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep no second copy, because a vocabulary is large."""
        self.metadata = self._files[0].metadata = metadata

    def pack(self, kinds: Collection[str], blocks: Collection[str] = ()) -> None:
        """Read matrices of these kinds packed for a GPU, and those of `blocks` in their blocks; see `marked_to_pack`."""
        self.tensors = {name: marked_to_pack(info, kinds, blocks) for name, info in self.tensors.items()}

    def read(self, name: str, *, in_groups: bool = False) -> Matrix:
        """Read a tensor as stored; see `tensors.decode`. `in_groups` packs a tensor that would stay in blocks."""
        file, info = self._where[name], self.tensors[name]
        if in_groups:
            info = replace(info, kept=None)
        if info.kept:
            return left_in_file(file, info)
        return decode(info, file.pieces(info, rows_at_a_time(info)))

    def floats(self, name: str) -> list[float]:
        """Values of a small vector."""
        return [float(value) for value in np.array(numbers(self.read(name))).reshape(-1)]

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _check_parts(self) -> None:
        count = _number(self.metadata, _COUNT) or 1
        if count not in (1, len(self._files)):
            raise CheckpointError(
                f"{self.path}: one of {count} parts of a model; keep their names as they were, NAME-00001-of-{count:05}.gguf and so on"
            )
        for index, file in enumerate(self._files):
            number = _number(file.metadata, _NUMBER)
            if number not in (None, index) or (_number(file.metadata, _COUNT) or 1) != count:
                raise CheckpointError(f"{file.path}: does not hold part {index + 1} of {count}; the parts were mixed up")

    def _locate(self) -> dict[str, GGUFFile]:
        where: dict[str, GGUFFile] = {}
        for file in self._files:
            for name in file.tensors:
                if name in where:
                    raise CheckpointError(f"{file.path}: tensor {name} is also in {where[name].path.name}; the parts were mixed up")
                where[name] = file
        expected = _number(self.metadata, _TENSORS) or len(where)
        if expected != len(where):
            raise CheckpointError(f"{self.path}: the parts hold {len(where)} tensors, their header says {expected}; download them again")
        return where


def _number(metadata: Mapping[str, Any], key: str) -> int | None:
    value = metadata.get(key)
    return value if type(value) is int else None


def part_paths(path: Path) -> list[Path]:
    """All files of the model that this file belongs to, in order. Raises `ModelNotFoundError` with the first missing file."""
    match = _PART.fullmatch(path.name)
    if not match:
        parts = [path]
    else:
        count = int(match[3])
        if not 1 <= int(match[2]) <= count:
            raise CheckpointError(f"{path}: part {match[2]} of {match[3]} makes no sense; give the file its old name back")
        parts = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            if part.is_dir():
                raise ModelNotFoundError(f"{part}: is a folder, not a GGUF file")
            of = f", one of the {len(parts)} parts of this model" if len(parts) > 1 else ""
            raise ModelNotFoundError(f"{part}: no such file{of}")
    return parts
