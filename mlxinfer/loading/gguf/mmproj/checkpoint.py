"""An mmproj GGUF file as a `Checkpoint` of a vision tower, with the config, names and processor settings of a hub directory."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ....errors import CheckpointError, UnsupportedModelError
from ....nn.weights import Dense, Format, Matrix
from ....util.plain_file import file_stamp
from ....util.typed_reader import shown
from ....vision.families import PROCESSORS
from ....vision.processor import ImageProcessor, ProcessorConfig, ProcessorFiles
from ..base_config import Config
from ..files import GGUFFiles
from ..reader import TensorInfo
from ..transforms import MappedTensor, joined_rows, unchanged
from .projector import ClipSource, Projector, joined_vectors, shaped, two_frames
from .projectors import PROJECTORS

_BLOCK = re.compile(r"v\.blk\.(\d+)\.(.+)")
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
_DEEPSTACK_PARTS = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_AUDIO = re.compile(r"(a|mm\.a)\.")
_SECOND_FRAME = ".weight.1"


class MMProjCheckpoint:
    """Implements `Checkpoint` for the file of a tower, which belongs to a text model in another file."""

    def __init__(self, path: Path, text: Config, tokens: Sequence[str]) -> None:
        """`text` is the text model's config, and `tokens` its vocabulary.

        Raises `UnsupportedModelError` for another kind of file or projector, and for a text model of another family. Raises
        `CheckpointError` for a damaged file, or one for another width of the text model.
        """
        self.path = path
        self._files = GGUFFiles(path)
        try:
            kind, self._projector = self._find_projector()
            source = ClipSource(path, self._files.metadata, self._files.tensors, text)
            self._check_text(source, text)
            self._settings = self._projector.settings(source)
            self.config: dict[str, Any] = {
                **self._projector.config(source),
                "model_type": self._projector.kind(text),
                "text_config": dict(text),
                "image_token_id": self._image_token(tokens, kind),
            }
            self._tensors = dict(self._mapped(source))
        except BaseException:
            self._files.close()
            raise

    def _find_projector(self) -> tuple[str, Projector]:
        metadata, path = self._files.metadata, self.path
        if metadata.get("general.architecture") != "clip":
            raise UnsupportedModelError(f"{path}: is a {shown(metadata.get('general.architecture'))} model, not an mmproj file (clip)")
        kind = metadata.get("clip.vision.projector_type", metadata.get("clip.projector_type"))
        if not isinstance(kind, str) or kind not in PROJECTORS or metadata.get("clip.has_vision_encoder") is False:
            raise UnsupportedModelError(
                f"{path}: images of the projector type {shown(kind)} are not supported (only {', '.join(PROJECTORS)}); "
                "give the model's safetensors instead"
            )
        return kind, PROJECTORS[kind]

    def _check_text(self, source: ClipSource, text: Config) -> None:
        width, hidden = source.keys.optional_integer("vision.projection_dim", low=0), text["hidden_size"]
        if width not in (None, 0, hidden):
            raise CheckpointError(f"{self.path}: belongs to a text model of {width} channels, and this one has {hidden}")

    def _image_token(self, tokens: Sequence[str], kind: str) -> int:
        token = self._projector.image_token
        if token not in tokens:
            raise UnsupportedModelError(f"{self.path}: {kind} needs the token {token}, which the text model's vocabulary does not have")
        return list(tokens).index(token)

    @property
    def processor(self) -> ImageProcessor:
        """The family's image processor, with the settings of the file and otherwise those of the hub's checkpoints."""
        image, prompt = self._settings
        files = ProcessorFiles(ProcessorConfig(self.path, image), ProcessorConfig(self.path, prompt), {}, self.config)
        found = PROCESSORS[self.config["model_type"]](files)
        found.tower = json.dumps(file_stamp(self.path))
        return found

    # --- tensors

    def _mapped(self, source: ClipSource) -> Iterator[tuple[str, MappedTensor]]:
        projector, infos = self._projector, self._files.tensors
        numbers = {"num_attention_heads": source.integer("attention.head_count")}
        swapped = _swaps_mlp(source)
        for name, info in infos.items():
            block, deep = _BLOCK.fullmatch(name), _DEEPSTACK.fullmatch(name)
            if name in projector.ignored or _AUDIO.match(name) or name.endswith(_SECOND_FRAME):
                continue
            if deep is not None:
                layers: list[int] = self.config["vision_config"].get("deepstack_visual_indexes", [])
                place = layers.index(int(deep[1])) if int(deep[1]) in layers else -1
                yield f"model.visual.deepstack_merger_list.{place}.{_DEEPSTACK_PARTS[deep[2]]}.{deep[3]}", unchanged(info)
            elif block is not None:
                yield from self._in_block(info, int(block[1]), swapped.get(block[2], block[2]), numbers)
            elif name + ".1" in infos:
                yield self._name(name, projector.model), two_frames(info, infos[name + ".1"])
            else:
                yield self._name(name, projector.model), self._edited(info, name, numbers)

    def _in_block(self, info: TensorInfo, layer: int, name: str, numbers: Config) -> Iterator[tuple[str, MappedTensor]]:
        stem, _, suffix = name.rpartition(".")
        place = f"{self._projector.blocks}.{layer}."
        if self._projector.joined and stem in ("attn_q", "attn_k", "attn_v"):
            if stem == "attn_q":
                parts = [self._files.tensors[f"v.blk.{layer}.attn_{part}.{suffix}"] for part in "qkv"]
                yield f"{place}attn.qkv.{suffix}", joined_vectors(parts) if suffix == "bias" else joined_rows(parts, lambda x: x)
            return
        yield place + self._name(name, self._projector.block), self._edited(info, name, numbers)

    def _edited(self, info: TensorInfo, name: str, numbers: Config) -> MappedTensor:
        stem, _, suffix = name.rpartition(".")
        transforms = self._projector.transforms
        transform = transforms.get(name) or (transforms.get(stem) if suffix in ("weight", "bias") else None)
        if transform is not None and not (suffix == "bias" and stem == "v.patch_embd"):
            return transform(info, numbers)
        if stem in ("v.class_embd", "v.position_embd") and self.config["model_type"] == "internvl":
            return shaped(1, -1, self.config["vision_config"]["hidden_size"])(info, numbers)
        return unchanged(info)

    def _name(self, name: str, table: Mapping[str, str]) -> str:
        """The hub's name; a tensor without one keeps its name, and the loader refuses it."""
        stem, _, suffix = name.rpartition(".")
        if name in table:
            return table[name]
        return f"{table[stem]}.{suffix}" if stem in table and suffix in ("weight", "bias") else name

    # --- `Checkpoint`

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
        return None

    def read(self, name: str) -> Matrix:
        tensor = self._tensors[name]
        matrix = tensor.make([self._files.read(source, in_groups=tensor.in_groups) for source in tensor.sources])
        if isinstance(matrix, Dense):
            matrix = Dense(mx.contiguous(matrix.weight))
            mx.eval(matrix.weight)
        return matrix

    def close(self) -> None:
        self._files.close()


def _swaps_mlp(source: ClipSource) -> dict[str, str]:
    """Names of the MLP's two matrices in files of 2024, which have `ffn_up` and `ffn_down` exchanged: the shapes show it."""
    rows, columns = source.shape("v.blk.0.ffn_down.weight")[-2:]
    if rows == columns or columns != source.hidden:
        return {}
    return {f"ffn_{a}.{suffix}": f"ffn_{b}.{suffix}" for a, b in (("up", "down"), ("down", "up")) for suffix in ("weight", "bias")}
