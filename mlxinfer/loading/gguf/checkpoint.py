"""A GGUF file as a `Checkpoint`, with the config and names of a converted directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError
from ...models.config_reader import IGNORED_KEYS, ignored_keys
from ...models.vlm_text import TEXT_ONLY
from ...nn.weights import Dense, Format, Matrix, Quantized, RawBlocks
from .families import architecture_name, rebuild_config
from .files import GGUFFiles
from .hparams import HParams
from .names import map_tensors
from .ollama import from_ollama
from .transforms import MappedTensor
from .types import QUANTIZED


class GGUFCheckpoint:
    """Implements `Checkpoint` for one GGUF file, or for the split model that it is a part of.

    Q4_0, Q4_1, Q8_0, MXFP4 and NVFP4 matrices stay packed, exactly. Plain types keep their dtype. Other types become float32, unless
    `pack` was called. With `raw_blocks`, matrices of types that the CPU kernels multiply (`kernels_cpu.gguf_types`) are `RawBlocks`,
    valid until `close`. Reading undoes llama.cpp's reorderings. A tensor that the architecture does not have keeps llama.cpp's name.
    Metadata keys in `ignore_config_keys`, with or without the architecture's prefix, count as absent.
    """

    def __init__(self, path: str | Path, *, raw_blocks: bool = False, ignore_config_keys: Collection[str] = ()) -> None:
        self.path = Path(path)
        self.packs = False
        """True after `pack`."""
        self._files = GGUFFiles(self.path, raw_blocks=raw_blocks)
        try:
            self.ignored_keys = self._files.leave_out(ignored_keys(self.path, ignore_config_keys))
            """Ignored keys that the file has."""
            text_only = from_ollama(self._files)
            self.config: dict[str, Any] = rebuild_config(self._files) | ({TEXT_ONLY: True} if text_only else {})
            if self.ignored_keys:
                self.config[IGNORED_KEYS] = list(self.ignored_keys)
            self._tensors = self._mapped()
        except ValueError as error:
            self._files.close()
            raise CheckpointError(f"{self.path}: {error}; convert the model again") from None
        except BaseException:
            self._files.close()
            raise

    def _mapped(self) -> dict[str, MappedTensor]:
        name = architecture_name(self._files)
        blocks = HParams(self.metadata, name, self.path).integer("block_count")
        return map_tensors(self._files.tensors, name, self.config, blocks)

    def pack(self, kinds: Collection[str], blocks: Collection[str] = ()) -> None:
        """Pack matrices of these kinds as in `mlx_formats.PACKINGS`, for a GPU or for an MLX directory. Matrices of the kinds `blocks`
        become `RawBlocks`. Scales and biases come in float32, unrounded."""
        self.packs = True
        self._files.pack(kinds, blocks)
        self._tensors = self._mapped()

    def kinds(self) -> frozenset[str]:
        """Types of all matrices in the file."""
        return frozenset(info.type.name for info in self._files.tensors.values() if len(info.shape) > 1)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF key to value: `str`, `int`, `float`, `bool`, `list[str]`, or a numpy array of numbers."""
        return self._files.metadata

    def forget_vocabulary(self) -> None:
        """Remove the tokens from `metadata`: their texts can be larger than the largest tensor of a small model."""
        for key in ("tokens", "scores", "token_type", "merges"):
            self._files.metadata.pop(f"tokenizer.ggml.{key}", None)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def nbytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def stored(self, name: str) -> Format | mx.Dtype:
        return self._tensors[name].stored

    def kind(self, name: str) -> str:
        return self._files.tensors[self._tensors[name].sources[0]].type.name

    def unpacked_from(self, name: str) -> str | None:
        kind = self.kind(name)
        return kind if kind[:1] in QUANTIZED and not isinstance(self.stored(name), Format) else None

    def read(self, name: str) -> Matrix:
        tensor = self._tensors[name]
        matrix = tensor.make([self._files.read(source, in_groups=tensor.in_groups) for source in tensor.sources])
        if isinstance(matrix, RawBlocks):
            return matrix
        if isinstance(matrix, Quantized):
            matrix = matrix.each(mx.contiguous)
            mx.eval(matrix.weight, matrix.scales, *([] if matrix.biases is None else [matrix.biases]))
            return matrix
        weight = mx.contiguous(matrix.weight)
        mx.eval(weight)
        return Dense(weight)

    def close(self) -> None:
        self._files.close()
