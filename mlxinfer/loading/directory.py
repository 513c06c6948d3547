"""A model directory of safetensors, as written by Hugging Face or MLX tools."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from ..models.config_reader import ignored_keys, with_ignored
from ..nn.weights import Dense, Format, Matrix, Quantized
from .files import read_json
from .formats import QuantizationBlock, format_text
from .safetensors import DTYPES, HeaderEntry, SafetensorsFile
from .weights import evaluate

if TYPE_CHECKING:
    from .quantized import PackedMatrix, StoredTensors

INDEX = "model.safetensors.index.json"
_MODELOPT = "hf_quant_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


class SafetensorsCheckpoint:
    """Implements `Checkpoint`. Opening it reads the config, the index and every header."""

    def __init__(self, path: str | Path, ignore_config_keys: Sequence[str] = (), *, float8: bool = False) -> None:
        """`ignore_config_keys` are unknown keys of the config to ignore. With `float8`, `read` may return matrices in the form of
        `FLOAT8`, which `nn.packing.settle` packs for the CPU kernels."""
        self.path = Path(path)
        self._float8 = float8
        self.config = with_ignored(read_config(self.path), ignored_keys(self.path, ignore_config_keys))
        foreign = foreign_quantization(self.config, self.path)
        block = None if foreign else quantization_block(self.config, self.path)
        listed = _weight_files(self.path)
        self._files = [SafetensorsFile(self.path / name) for name in listed]
        self._where = _locate(self.path, self._files, listed)
        self._packed = self._find_packed(*foreign) if foreign else {}
        self._formats = self._find_quantized(block) if not foreign else {}
        hidden = {part for matrix in self._packed.values() for part in matrix.parts}
        self._names = [*(name for name in self._where if name not in hidden and not self._is_part(name)), *self._packed]

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._packed:
            return self._packed[name].shape
        shape = self._info(name).shape
        if name not in self._formats:
            return shape
        return (*shape[:-1], shape[-1] * 32 // self._formats[name].bits)

    def nbytes(self, name: str) -> int:
        return sum(self._info(part).nbytes for part in self.parts(name))

    def kind(self, name: str) -> str:
        return self._packed[name].kind if name in self._packed else format_text(self.stored(name))

    def unpacked_from(self, name: str) -> str | None:
        return self.kind(name) if name in self._packed and not isinstance(self.stored(name), Format) else None

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as the files store them."""
        from .quantized import StoredTensors  # few models need them

        return StoredTensors(self.path, self._where, float8=self._float8)

    @property
    def is_foreign(self) -> bool:
        """True if another tool than MLX has quantized it, so that `read` returns some tensors in another form than stored."""
        return bool(self._packed)

    def stored(self, name: str) -> Format | mx.Dtype:
        if name in self._packed:
            return self._packed[name].stored
        if name in self._formats:
            return self._formats[name]
        info = self._info(name)
        if info.dtype not in DTYPES:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r} is stored as {info.dtype}, which cannot be read")
        return DTYPES[info.dtype]

    def read(self, name: str) -> Matrix:
        if name in self._packed:
            return self.read_rows(name, 0, self._packed[name].shape[0])
        stored = [self._where[part].read(part) for part in self.parts(name)]
        return self._matrix(name, stored)

    def read_rows(self, name: str, first: int, last: int) -> Matrix:
        """Read the rows `first .. last` of the first axis."""
        if name in self._packed:
            return evaluate(self._packed[name].read(first, last))
        stored = [self._where[part].read_rows(part, first, last) for part in self.parts(name)]
        return self._matrix(name, stored)

    def lazy(self) -> dict[str, mx.array]:
        """Return every stored tensor under its own name, packed matrices in parts, unevaluated."""
        loaded = {file: cast(dict[str, mx.array], mx.load(str(file.path))) for file in self._files}
        return {name: loaded[file][name] for name, file in self._where.items()}

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _matrix(self, name: str, arrays: list[mx.array]) -> Matrix:
        if name not in self._formats:
            return Dense(arrays[0])
        return Quantized(arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else None, self._formats[name])

    def _info(self, name: str) -> HeaderEntry:
        return self._where[name].tensors[name]

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that a logical tensor consists of."""
        if name in self._packed:
            return self._packed[name].parts
        if name not in self._formats:
            return (name,)
        parts = (name, _without_suffix(name) + ".scales")
        return (*parts, _without_suffix(name) + ".biases") if self._formats[name].mode == "affine" else parts

    def _is_part(self, name: str) -> bool:
        base, _, last = name.rpartition(".")
        return last in ("scales", "biases") and name in self.parts(f"{base}.weight")

    def _find_packed(self, method: str, block: dict[str, Any]) -> dict[str, PackedMatrix]:
        from .quantized import find_packed  # few models need them

        return find_packed(method, block, self.tensors)

    def _find_quantized(self, block: QuantizationBlock | None) -> dict[str, Format]:
        formats = {}
        for name in self._where:
            scales = _without_suffix(name) + ".scales"
            if not name.endswith(".weight") or scales not in self._where or self._info(name).dtype != "U32":
                continue
            if block is None:
                raise CheckpointError(f"{self.path}: {name} is quantized, but config.json has no quantization block")
            formats[name] = self._format(block, name, self._info(scales))
        return formats

    def _format(self, block: QuantizationBlock, name: str, scales: HeaderEntry) -> Format:
        f = block.format(_without_suffix(name), self._info(name).shape, scales.shape, DTYPES.get(scales.dtype, mx.int8))
        biases = self._where.get(_without_suffix(name) + ".biases")
        if f.mode == "affine" and (biases is None or biases.tensors[_without_suffix(name) + ".biases"].shape != scales.shape):
            raise CheckpointError(f"{self.path}: {_without_suffix(name)}.biases is missing or not of the shape of the scales")
        return f


def _without_suffix(name: str) -> str:
    return name.removesuffix(".weight")


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config of a model directory. Code that it names (`auto_map`) is never run."""
    if not (directory / "config.json").exists():
        raise ModelNotFoundError(f"{directory} has no config.json: give a model directory, a .gguf file or a hub id")
    return read_json(directory / "config.json")


def _stated_quantization(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config's block about quantization, of MLX or another tool; empty if there is none."""
    text = config.get("text_config")
    nested = text if isinstance(text, dict) else {}
    block = config.get("quantization") or config.get("quantization_config") or nested.get("quantization_config") or {}
    if not isinstance(block, dict):
        raise CheckpointError(f"{path}: the quantization block of config.json is not an object")
    if config.get("quantization"):
        return block
    if isinstance(compression := config.get("compression_config"), dict):
        return compression | {"quant_method": "compressed-tensors"}
    if (path / _MODELOPT).exists() and block.get("quant_method", "modelopt") == "modelopt":
        return read_json(path / _MODELOPT) | {"quant_method": "modelopt"}
    return block


def foreign_quantization(config: dict[str, Any], path: Path) -> tuple[str, dict[str, Any]] | None:
    """The quantization method of another tool than MLX, and its block of the config; None for MLX's.

    Raises `UnsupportedModelError` for an unsupported method.
    """
    block = _stated_quantization(config, path)
    method = block.get("quant_method")
    if method is None or (method == "mxfp4" and config.get("model_type") == "gpt_oss"):
        return None
    from .quantized import check_method

    check_method(str(method), path)
    return str(method), block


def quantization_block(config: dict[str, Any], path: Path) -> QuantizationBlock | None:
    """MLX's block of a config, or None. Raises `UnsupportedModelError` if the block names no method."""
    block = _stated_quantization(config, path)
    if not block or block.get("quant_method") == "mxfp4":
        return None
    if "bits" not in block:
        raise UnsupportedModelError(
            f"{path} is quantized with an unknown method, which is not supported: use the original, a GGUF or an MLX version of the model"
        )
    return QuantizationBlock(block)


def _weight_files(directory: Path) -> dict[str, list[str] | None]:
    """The files to read, each with the tensors that the index places there (None: all tensors of the file)."""
    if (directory / INDEX).exists():
        return dict(_indexed(directory))
    found = sorted(p.name for p in directory.glob("*.safetensors") if not p.name.startswith("adapter"))
    if "model.safetensors" in found:
        return {"model.safetensors": None}
    if not found:
        raise _no_weights(directory)
    shards = [match for name in found if (match := _SHARD.fullmatch(name))]
    if not shards and len(found) > 1:
        raise CheckpointError(f"{directory} has {len(found)} safetensors files and no {INDEX} that says which to read")
    for match in shards:
        _check_complete(directory, match, found)
    return dict.fromkeys(found)


def _indexed(directory: Path) -> Iterable[tuple[str, list[str]]]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX} has no weight_map")
    tensors: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{directory / INDEX} puts {name!r} into {shard!r}, which is no safetensors file of the directory")
        tensors.setdefault(shard, []).append(name)
    missing = [shard for shard in tensors if not (directory / shard).exists()]
    if missing:
        raise CheckpointError(f"{directory} lacks {', '.join(missing[:5])}, listed in its index; download the model again")
    return tensors.items()


def _check_complete(directory: Path, match: re.Match[str], found: list[str]) -> None:
    stem, total = match[1], int(match[3])
    names = [f"{stem}-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(f"{directory} lacks {', '.join(missing[:5])}; download the model again")


def _no_weights(directory: Path) -> Exception:
    pickles = sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern))
    if pickles:
        return UnsupportedModelError(
            f"{directory} has pickled weights only ({pickles[0]}), which can run code when they are read; save the model "
            "with save_pretrained of transformers, or use https://huggingface.co/spaces/safetensors/convert"
        )
    if any(directory.glob("adapter*.safetensors")):
        return UnsupportedModelError(f"{directory} holds an adapter, not a model: merge it into its base model first")
    return CheckpointError(f"{directory} has no .safetensors file")


def _locate(directory: Path, files: list[SafetensorsFile], listed: dict[str, list[str] | None]) -> dict[str, SafetensorsFile]:
    where: dict[str, SafetensorsFile] = {}
    for file in files:
        absent = [name for name in listed[file.path.name] or () if name not in file.tensors]
        if absent:
            raise CheckpointError(f"{file.path} lacks the tensor {absent[0]!r}, which the index puts there")
        where.update(dict.fromkeys(listed[file.path.name] or (), file))
    for file in files:
        for name in file.tensors:
            if where.setdefault(name, file) is not file and listed[file.path.name] is None:
                raise CheckpointError(f"{directory}: tensor {name!r} is in {where[name].path.name} and in {file.path.name}")
    return where
