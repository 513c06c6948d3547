"""InternVL: a grid of square tiles of the closest aspect ratio, and a thumbnail.

Source: `GotOcr2ImageProcessorPil` with `crop_to_patches`, which `InternVLProcessor` always sets, of transformers 5.24 (`internvl`); and
`dynamic_preprocess` in the model cards of OpenGVLab (`internvl_chat`), which cuts alike and takes its settings from config.json.
`Pixels.values` is uint8 [tiles, 3, height, width], row by row; with several tiles, the last is a thumbnail of the whole picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..processor import (
    CLIP_MEAN,
    CLIP_STD,
    Budget,
    Bytes,
    ImageProcessor,
    Layout,
    Normalization,
    Pixels,
    ProcessorConfig,
    ProcessorFiles,
    Size,
    channels_first,
    closest_grid,
    cut,
    read_object,
)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MOST_TILES = 1024
_TOKEN = "<IMG_CONTEXT>"


class InternVLProcessor(ImageProcessor):
    """`detail` low means one tile; `max_pixels` limits the number of tiles."""

    source = "GotOcr2ImageProcessorPil, InternVLProcessor"
    limits = frozenset({"max_pixels"})

    def read(self, files: ProcessorFiles) -> None:
        config = files.image
        self._normalization = Normalization.read(config, resample=3, mean=CLIP_MEAN, std=CLIP_STD)
        self.image_token = self.placeholder = files.token("context_image_token", _TOKEN)
        self._begin, self._end = files.token("start_image_token", "<img>"), files.token("end_image_token", "</img>")
        self._thumbnail = True
        size = config.sizes("size", ("height", "width"), {"height": 384, "width": 384})
        if len(size) < 2:
            raise config.error("size", "has no height and width")
        self._tile: Size = size["height"], size["width"]
        config.boolean("crop_to_patches", True)
        self._least = config.integer("min_patches", 1, high=_MOST_TILES)
        self._most = config.integer("max_patches", 12, low=self._least, high=_MOST_TILES)
        self._count = files.prompt.integer("image_seq_length", 256)

    def layout(self, size: Size, budget: Budget) -> Layout:
        most = 1 if budget.detail == "low" else self._most
        if budget.max_pixels:
            most = max(1, min(most, budget.max_pixels // (self._tile[0] * self._tile[1])))
        least = min(self._least, most)
        # By number of tiles; of equal numbers, wider than high is last.
        grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1) if least <= rows * columns <= most]
        tiles = closest_grid(size, self._tile, sorted(grids, key=lambda grid: grid[0] * grid[1])) if most > 1 else (1, 1)
        number = tiles[0] * tiles[1]
        pieces = (self._tile,) * (number + 1 if number > 1 and self._thumbnail else number)
        canvas = tiles[0] * self._tile[0], tiles[1] * self._tile[1]
        return Layout(size, (canvas,), tiles, pieces, (self._count * len(pieces),))

    def pixels_of(self, image: Bytes, layout: Layout) -> Pixels:
        tiles = cut(self._normalization.resized(image, *layout.steps), layout.tiles)
        if len(layout.pieces) > len(tiles):
            tiles.append(self._normalization.resized(image, self._tile))
        return Pixels(layout, channels_first(tiles), self._normalization.table)

    def expansion(self, layout: Layout) -> str:
        return f"{self._begin}{self.image_token * layout.tokens}{self._end}"


class InternVLChatProcessor(InternVLProcessor):
    """InternVL in its original form."""

    source = "dynamic_preprocess, InternVLChatModel"
    unused = frozenset(
        {"crop_size", "do_center_crop", "do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std"}
        | {"resample", "rescale_factor", "size"}
    )
    """OpenGVLab's code does not read these settings, which describe another class."""

    @property
    def in_text(self) -> str:
        return f"{self.placeholder}\n"

    def token_id(self, files: ProcessorFiles) -> int:
        """Return the id of `<IMG_CONTEXT>`, which usually only the tokenizer's files have. Raises `CheckpointError`."""
        if "image_token_id" in files.model:
            return files.token_id()
        added = files.tokens.get("added_tokens_decoder")
        for number, token in added.items() if isinstance(added, Mapping) else ():
            if isinstance(token, Mapping) and token.get("content") == _TOKEN and number.isdecimal():
                return int(number)
        found = read_object(files.image.path.parent / "added_tokens.json").get(_TOKEN, _in_tokenizer(files.image.path.parent))
        if type(found) is not int:
            raise CheckpointError(f"{files.image.path.parent} has no token {_TOKEN}: its tokenizer cannot show where an image is")
        return found

    def read(self, files: ProcessorFiles) -> None:
        config = ProcessorConfig(files.image.path.parent / "config.json", files.model)
        vision = ProcessorConfig(config.path, _object(files.model.get("vision_config")))
        self._normalization = Normalization.read(ProcessorConfig(config.path, {}), resample=3, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        self.image_token = self.placeholder = _TOKEN
        self._begin, self._end = "<img>", "</img>"
        side = config.integer("force_image_size", vision.integer("image_size", 448))
        self._tile = side, side
        self._least = config.integer("min_dynamic_patch", 1, high=_MOST_TILES)
        self._most = config.integer("max_dynamic_patch", 12, low=self._least, high=_MOST_TILES)
        if not config.boolean("dynamic_image_size", True):
            self._least = self._most = 1
        self._thumbnail = config.boolean("use_thumbnail", True)
        self._count = int((side // vision.integer("patch_size", 14)) ** 2 * config.number("downsample_ratio", 0.5) ** 2)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _in_tokenizer(directory: Path) -> Any:
    """Return the id of the token in tokenizer.json; None without it."""
    added = read_object(directory / "tokenizer.json").get("added_tokens")
    return next((each.get("id") for each in added or () if isinstance(each, Mapping) and each.get("content") == _TOKEN), None)
