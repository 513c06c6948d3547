"""A projector type of mmproj files: the config of the family's tower, the names of its tensors, and the settings of its processor.

Sources: `gguf/constants.py` and the `MmprojModel` classes of https://github.com/ggml-org/llama.cpp for names and edits. The processor's
settings follow the checkpoints on the hub, because these files have few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ....errors import CheckpointError
from ....nn.weights import Dense, numbers
from ....util.dataclass import dataclass
from ..base_config import Config
from ..hparams import HParams
from ..reader import TensorInfo
from ..transforms import MappedTensor, Transform, unchanged, values

Settings = dict[str, Any]


class ClipSource:
    """Metadata and tensors of an mmproj file, and the config of the text model."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], text: Config) -> None:
        self.path, self.tensors, self.text = path, tensors, text
        self.keys = HParams(metadata, "clip", path)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises `CheckpointError` if the file does not have the tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; download or convert the file again")
        return self.tensors[name].shape

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer of `clip.vision`. Raises `CheckpointError`."""
        return self.keys.integer(f"vision.{key}", default)

    def floats(self, key: str, default: tuple[float, ...]) -> list[float]:
        """Return a list of numbers of `clip.vision`, such as `image_mean`."""
        value = self.keys.take(f"vision.{key}")
        return list(default) if value is None else [float(number) for number in np.asarray(value, np.float32).reshape(-1)]

    @property
    def hidden(self) -> int:
        return self.integer("embedding_length")

    @property
    def patch(self) -> int:
        return self.integer("patch_size")

    @property
    def inner(self) -> int:
        """Channels inside the MLP: of the tensor, since some converters write another number."""
        rows, columns = self.shape("v.blk.0.ffn_up.weight")[-2:]
        return columns if rows == self.hidden else rows

    @property
    def layers(self) -> int:
        return self.integer("block_count")

    @property
    def side(self) -> int:
        """Pixels along each side of a square image or tile."""
        return self.integer("image_size")

    def vision_config(self) -> Config:
        """Return the keys of `vision_config` that most towers share."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.integer("attention.head_count"),
            "patch_size": self.patch,
        }


@dataclass(frozen=True, slots=True)
class Projector:
    """An entry of `projectors.PROJECTORS`."""

    kind: Callable[[Config], str]
    """Maps the text model's config to the `model_type` of the whole."""
    config: Callable[[ClipSource], Config]
    """Returns `vision_config` and other keys of the whole model's config, without `model_type` and `text_config`."""
    settings: Callable[[ClipSource], tuple[Settings, Settings]]
    """Returns the settings of the image processor and those of the processor, as in the family's two JSON files."""
    image_token: str
    """Text of the token of image rows, to find its id in the vocabulary."""
    model: Mapping[str, str]
    """Names outside of blocks to those of the hub; names without a suffix stand for a weight and a bias."""
    block: Mapping[str, str]
    """Names within a block."""
    blocks: str
    """Name of the blocks, before their number."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    """Edits of llama.cpp's converter to undo, by the names in the file, without suffix."""
    joined: bool = False
    """True if queries, keys and values are one matrix on the hub, which some files divide."""
    ignored: frozenset[str] = frozenset()
    """Tensors that the family does not need."""


def shaped(*axes: int) -> Transform:
    """Give a tensor these axes, of which one may be -1."""

    def transform(info: TensorInfo, config: Config) -> MappedTensor:
        known = int(np.prod([axis for axis in axes if axis > 0]))
        count = int(np.prod(info.shape))
        target = tuple(count // known if axis < 0 else axis for axis in axes)
        if int(np.prod(target)) != count:
            return unchanged(info)
        return values(info, lambda x: x.reshape(target), target)

    return transform


def channels_last(info: TensorInfo, config: Config) -> MappedTensor:
    """Flatten a convolution `[out, channels, patch, patch]` to rows in the order (row, column, channel)."""
    if len(info.shape) != 4:
        return unchanged(info)
    rows, wide = info.shape[0], int(np.prod(info.shape[1:]))
    return values(info, lambda x: mx.moveaxis(x, 1, -1).reshape(rows, wide), (rows, wide))


def two_frames(first: TensorInfo, second: TensorInfo) -> MappedTensor:
    """Join the halves of a convolution over two frames to `[out, channels, 2, patch, patch]`."""
    shape = (*first.shape[:2], 2, *first.shape[2:])
    nbytes = first.nbytes + second.nbytes
    return MappedTensor(
        (first.name, second.name), shape, mx.float32, nbytes, lambda parts: Dense(mx.stack([numbers(part) for part in parts], axis=2))
    )


def joined_vectors(infos: list[TensorInfo]) -> MappedTensor:
    """Join vectors end to end."""
    count, nbytes = sum(info.shape[0] for info in infos), sum(info.nbytes for info in infos)
    names = tuple(info.name for info in infos)
    return MappedTensor(names, (count,), mx.float32, nbytes, lambda parts: Dense(mx.concatenate([numbers(part) for part in parts])))
