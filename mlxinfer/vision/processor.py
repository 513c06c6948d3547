"""Pre-processing of pictures for a model family: the settings in a checkpoint, the layout of an image, and its pixels.

A family is a subclass of `ImageProcessor` in `families/`. `plan` needs only the size of a picture, which `picture.picture_size` reads from
the header. `pixels` resizes with Pillow and keeps uint8; `Pixels.normalized` gives the float32 values of transformers' Pil image
processors (version 5.24), equal to the bit. Normalizing a uint8 channel is a table of 256 values: `Pixels.table`.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from math import isqrt
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from ..errors import CheckpointError, ImageError, SettingError, UnsupportedModelError, one_line
from ..util.dataclass import dataclass
from ..util.plain_file import read_plain
from ..util.typed_reader import TypedReader, is_number, shown
from .picture import Picture

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Channels = tuple[float, float, float]
Size = tuple[int, int]
"""(height, width) or (rows, columns)."""

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
_MOST_BYTES = 16 << 20
_HARMLESS = re.compile(
    "do_convert_rgb|do_pad|pad_size|padding_value|crop_size|data_format|input_data_format|device|disable_grouping|default_to_square|auto_map|"
    "return_tensors|return_row_col_info|return_mask|image_processor_type|feature_extractor_type|video_processor_type|processor_class|"
    "num_channels|image_seq_length|max_num_patches"
)
"""Keys that describe batching, devices and classes, or whose value follows from others."""
_OF_PIXELS = re.compile(
    "do_.*|size|max_pixels|min_pixels|patch_size|merge_size|temporal_patch_size|resample|image_mean|image_std|rescale_factor|max_image_size|"
    "crop_to_patches|min_patches|max_patches|max_soft_tokens|pooling_kernel_size|tile_size"
)
"""Keys that change pixels or counts of tokens in some family."""


class ProcessorConfig(TypedReader):
    """Typed reader of an image processor's settings. A null is a missing key, as in transformers."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__({key: value for key, value in values.items() if value is not None})
        self.path = path

    def error(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {key} {what}")

    def sizes(self, key: str, names: tuple[str, ...], default: Mapping[str, int]) -> dict[str, int]:
        """Return the whole numbers in a mapping such as `size`. Only `names` may occur; a number means each of them."""
        value = self.take(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            value = dict.fromkeys(names, value)
        if not isinstance(value, Mapping):
            raise self.bad(key, value, f"an object with {' and '.join(names)}")
        inner = ProcessorConfig(self.path, value)
        found = {name: inner.integer(name) for name in names if inner.has(name)}
        for name, number in inner.untaken():
            raise self.error(f"{key}.{name}", f"is {shown(number)}, must not be set")
        return found

    def channels(self, key: str, default: Channels) -> Channels:
        """Return a value for each of the three channels; a single number means all."""
        value = self.take(key, default)
        values = [value] * 3 if is_number(value) else value
        if not isinstance(values, (list, tuple)) or len(values) != 3 or not all(map(is_number, values)):
            raise self.bad(key, value, "a list of three numbers")
        return float(values[0]), float(values[1]), float(values[2])

    def must_be(self, key: str, wanted: bool) -> None:
        """Refuse another value of a switch, which would change the pixels."""
        if self.boolean(key, wanted) is not wanted:
            raise self.error(key, f"is {str(not wanted).lower()}, which is not supported")

    def ignored(self, unused: Iterable[str] = ()) -> list[str]:
        """Return the unknown keys, which are ignored. Raises for unread keys that change the pixels; `unused` are those that do not."""
        rest = {key: value for key, value in self.untaken() if value is not False and not _HARMLESS.fullmatch(key) and key not in unused}
        for key, value in rest.items():
            if _OF_PIXELS.fullmatch(key):
                raise self.error(key, f"is {shown(value)}, which is not supported for this family")
        return sorted(rest)


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Files of a checkpoint that describe its images."""

    image: ProcessorConfig
    """Settings of the image processor: preprocessor_config.json, or `image_processor` in processor_config.json."""
    prompt: ProcessorConfig
    """processor_config.json: counts and names of tokens."""
    tokens: Mapping[str, Any]
    """tokenizer_config.json."""
    model: Mapping[str, Any]
    """config.json."""

    @classmethod
    def read(cls, directory: Path) -> ProcessorFiles:
        """Read the files of a model directory. Raises `CheckpointError`."""
        prompt = read_object(directory / PROCESSOR)
        nested = prompt.pop("image_processor", None)
        path = directory / (PREPROCESSOR if nested is None else PROCESSOR)
        image = read_object(path) if nested is None else nested
        if not isinstance(image, Mapping) or not image:
            raise CheckpointError(f"{directory} has no {PREPROCESSOR}: without it, images cannot be prepared for this model")
        configs = ProcessorConfig(path, image), ProcessorConfig(directory / PROCESSOR, prompt)
        return cls(*configs, read_object(directory / "tokenizer_config.json"), read_object(directory / "config.json"))

    def token(self, name: str, default: str) -> str:
        """Return a named special token of the tokenizer, such as `image_token`."""
        named = self.tokens.get("extra_special_tokens"), self.tokens.get("model_specific_special_tokens")
        for source in (self.tokens, *(each for each in named if isinstance(each, Mapping))):
            value = source.get(name)
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str) and value:
                return value
        return default

    def token_id(self) -> int:
        """Return the id of the token whose rows are replaced by image features."""
        found = [self.model[key] for key in ("image_token_id", "image_token_index") if type(self.model.get(key)) is int]
        if not found or found[0] < 0:
            raise CheckpointError(f"{self.image.path.parent / 'config.json'} has no image_token_id")
        return int(found[0])


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} without the file. Raises `CheckpointError`."""
    try:
        value = json.loads(read_plain(path, _MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of an image's resolution, beside those of the checkpoint. Raises `SettingError`."""

    max_pixels: int | None = None
    """Maximum pixels after resizing, for all tiles together without the thumbnail; never below the family's smallest image."""
    min_pixels: int | None = None
    """Pixels to which smaller images are enlarged."""
    detail: Literal["auto", "low", "high"] = "auto"
    """"low": the least that the family offers, such as a single tile; "high": the most; "auto": the checkpoint's own settings."""

    def __post_init__(self) -> None:
        for name, value in (("max_pixels", self.max_pixels), ("min_pixels", self.min_pixels)):
            if value is not None and (type(value) is not int or value < 1):
                raise SettingError(f"{name} is {shown(value)}, must be a whole number of at least 1")
        if self.detail not in ("auto", "low", "high"):
            raise SettingError(f"detail is {shown(self.detail)}, must be auto, low or high")
        if self.max_pixels is not None and self.min_pixels is not None and self.min_pixels > self.max_pixels:
            raise SettingError(f"min_pixels is {self.min_pixels}, above max_pixels ({self.max_pixels})")


DEFAULT_BUDGET = Budget()
MOST_RATIO = 200
"""Maximum ratio of the sides in families that limit it."""
LOW_PIXELS = 512 * 512
"""`max_pixels` of `detail="low"` in families of free sizes."""
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class Layout:
    """Place of an image in the prompt, known from its size alone."""

    size: Size
    """(height, width) of the picture."""
    steps: tuple[Size, ...]
    """(height, width) of each resizing, one after another, before the image is cut into tiles."""
    tiles: Size
    """(rows, columns) of tiles; (1, 1) if the image is whole."""
    pieces: tuple[Size, ...]
    """(height, width) in pixels of each tile, row by row; a thumbnail of the whole image is last."""
    counts: tuple[int, ...]
    """Image rows of each run in the prompt: consecutive placeholder tokens after tokenization."""
    grid: Size | None = None
    """(rows, columns) of the image rows, if they are one grid; None for tiles."""

    @property
    def resized(self) -> Size:
        """(height, width) after resizing. Coordinates in an answer may refer to these."""
        return self.steps[-1]

    @property
    def tokens(self) -> int:
        """Number of image rows, without separators."""
        return sum(self.counts)

    @property
    def scaled_down(self) -> bool:
        """True if the model sees fewer pixels than the picture has."""
        return self.resized[0] * self.resized[1] < self.size[0] * self.size[1]

    def note(self) -> str | None:
        """Return a line about lost resolution; None if nothing was lost."""
        if not self.scaled_down:
            return None
        (height, width), (new_height, new_width) = self.size, self.resized
        return f"an image of {width} x {height} pixels is scaled down to {new_width} x {new_height} ({self.tokens} tokens)"


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """Pixels of one image as its tower takes them, before normalization."""

    layout: Layout
    values: Bytes
    """uint8 [tiles, 3, height, width] (`channel_axis` 1), or patches as the family documents."""
    table: Floats
    """float32 [3, 256]: normalized value of each channel and byte."""
    channel_axis: int = 1
    frames: int = 1
    """Copies of each patch along a time axis after the channels (Qwen: a still counts as two frames)."""
    flat: bool = False
    """True if `normalized` flattens each patch into one row."""
    tower: str = ""
    """`ImageProcessor.tower`."""

    def normalized(self) -> Floats:
        """Return float32 values as transformers' `pixel_values` of this image, without padding.

        Tiles are [tiles, 3, height, width]. Patches are [patches, values of a patch].
        """
        channels = np.moveaxis(self.values, self.channel_axis, 0)
        found: Floats = np.moveaxis(np.stack([self.table[c][channels[c]] for c in range(3)]), 0, self.channel_axis)
        if self.frames > 1:
            found = np.repeat(np.expand_dims(found, 2), self.frames, axis=2)
        return np.ascontiguousarray(found.reshape(len(found), -1) if self.flat else found)


@dataclass(frozen=True, slots=True)
class Normalization:
    """Settings that all families share."""

    resample: int
    """Pillow's number of the filter."""
    table: Floats = field(compare=False, repr=False)
    """float32 [3, 256]; see `Pixels.table`."""

    @classmethod
    def read(
        cls, config: ProcessorConfig, *, resample: int, mean: tuple[float, float, float], std: tuple[float, float, float]
    ) -> Normalization:
        """Read rescaling, mean, deviation and filter; the arguments are the family's defaults."""
        config.must_be("do_resize", True)
        config.must_be("do_rescale", True)
        config.must_be("do_center_crop", False)
        number = config.integer("resample", resample, low=0, high=5)
        values = np.arange(256, dtype=np.float64) * config.positive("rescale_factor", 1 / 255)
        table = np.repeat(values.astype(np.float32)[None], 3, axis=0)
        means, deviations = config.channels("image_mean", mean), config.channels("image_std", std)
        if config.boolean("do_normalize", mean != (0.0, 0.0, 0.0)):
            if 0 in deviations:
                raise config.error("image_std", "has a zero")
            table = (table - np.array(means, np.float32)[:, None]) / np.array(deviations, np.float32)[:, None]
        table.flags.writeable = False
        return cls(number, table)

    def resized(self, image: Bytes, *steps: Size) -> Bytes:
        """Return the image [height, width, 3] resized to each of `steps` in turn with Pillow, as transformers' Pil classes do."""
        from PIL import Image

        found = Image.fromarray(np.ascontiguousarray(image))
        for height, width in steps:
            found = found.resize((width, height), Image.Resampling(self.resample))
        return np.asarray(found)


class ImageProcessor(ABC):
    """Pre-processing of one family. Immutable after construction, so it can be shared by threads."""

    source: ClassVar[str]
    """Classes of transformers that it equals."""
    limits: ClassVar[frozenset[str]] = frozenset({"max_pixels", "min_pixels"})
    """Fields of `Budget` that the family can follow."""

    limits_ratio: ClassVar[bool] = False
    """True for families whose enlarged size has no limit without one of the ratio of the sides."""

    placeholder: str
    """Text that the chat template renders for an image."""
    image_token: str
    """Text of the token that stands for an image row."""

    tower: str = ""
    """Identity of a tower that has a file of its own, so that cached features and pages of two such files differ."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.image_token_id = self.token_id(files)
        """Id of `image_token`. It may exceed the embedding of the model and is never looked up."""
        self.read(files)
        self.ignored_keys = tuple(files.image.ignored(self.unused))
        """Unknown keys of the checkpoint's settings, which are ignored."""

    unused: ClassVar[frozenset[str]] = frozenset()
    """Settings of other families that checkpoints of this one also contain."""

    @property
    def in_text(self) -> str:
        """Text for an image in a message of text, for templates that take no lists of parts."""
        return self.placeholder

    def token_id(self, files: ProcessorFiles) -> int:
        """Return the id of `image_token`. Raises `CheckpointError`."""
        return files.token_id()

    @abstractmethod
    def read(self, files: ProcessorFiles) -> None:
        """Read the family's settings. Raises `UnsupportedModelError`."""

    @abstractmethod
    def layout(self, size: Size, budget: Budget) -> Layout:
        """Return the layout of a picture of (height, width). Raises `ImageError` for sizes that the family refuses."""

    @abstractmethod
    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        """Return the pixels of an image [height, width, 3] that has this layout."""

    @abstractmethod
    def expansion(self, layout: Layout) -> str:
        """Return the text that replaces the placeholder of an image, as the processor class of transformers writes it."""

    def plan(self, size: Size, budget: Budget = DEFAULT_BUDGET) -> Layout:
        """Return the layout of a picture of (height, width) pixels.

        Raises `ImageError` for sizes that the family refuses, and `SettingError` for limits that the family cannot follow.
        """
        if min(size) < 1:
            raise ImageError(f"the image is empty: {size[1]} x {size[0]} pixels")
        if self.limits_ratio and max(size) / min(size) > MOST_RATIO:
            raise ImageError(f"the image has {size[1]} x {size[0]} pixels: one side is more than {MOST_RATIO} times the other; crop it")
        for name in ("max_pixels", "min_pixels"):
            if getattr(budget, name) is not None and name not in self.limits:
                raise SettingError(f"{name} does not apply to this model: its images have a fixed size; remove the setting")
        return self.layout(size, budget)

    def pixels(self, picture: Picture, budget: Budget = DEFAULT_BUDGET) -> Pixels:
        """Return the resized uint8 pixels and their layout. Raises as `plan`."""
        found = self.pixels_of(picture.pixels, self.plan(picture.size, budget))
        return replace(found, tower=self.tower) if self.tower else found


def patches(image: Bytes, size: int) -> Bytes:
    """Return the square patches of an image [height, width, 3], row by row, as [patches, size, size, 3]."""
    rows, columns = image.shape[0] // size, image.shape[1] // size
    split = image.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(split).reshape(rows * columns, size, size, 3)


def channels_first(tiles: Iterable[Bytes]) -> Bytes:
    """Return tiles [height, width, 3] of one size as [tiles, 3, height, width]."""
    return np.ascontiguousarray(np.stack(list(tiles)).transpose(0, 3, 1, 2))


def cut(image: Bytes, tiles: Size) -> list[Bytes]:
    """Return the equal tiles of an image [height, width, 3], row by row."""
    height, width = image.shape[0] // tiles[0], image.shape[1] // tiles[1]
    return [image[r * height : (r + 1) * height, c * width : (c + 1) * width] for r in range(tiles[0]) for c in range(tiles[1])]


def square_grid(count: int) -> Size | None:
    """Return (side, side) for a square number of rows, else None."""
    side = isqrt(count)
    return (side, side) if side * side == count else None


def closest_grid(size: Size, tile: Size, grids: Iterable[Size]) -> Size:
    """Return the (rows, columns) of tiles with the aspect ratio closest to a picture of (height, width).

    Ties: the later one if the picture's area exceeds half of its tiles' area. Equals `get_optimal_tiled_canvas` (got_ocr2) and
    `find_closest_aspect_ratio` (lfm2_vl).
    """
    ratio, area = size[1] / size[0], size[0] * size[1]
    best, least = (1, 1), float("inf")
    for rows, columns in grids:
        difference = abs(ratio - columns / rows)
        if difference < least or (difference == least and area > 0.5 * tile[0] * tile[1] * rows * columns):
            best, least = (rows, columns), difference
    return best
