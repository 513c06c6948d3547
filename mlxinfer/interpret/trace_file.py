"""Traces as safetensors files.

An array's name is its place and layer, such as `residual.3`; of "kv", `kv.3.keys` and `kv.3.values`. `token_ids` is int32 `[T]`.
`image.0.rows` are the rows of the first image, and `about` the UTF-8 bytes of a JSON object with the tokens' texts and the images' sizes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..errors import SettingError
from ..util.dataclass import dataclass
from .places import KV, LOGITS, TRACED

if TYPE_CHECKING:
    from ..models.decoder import Decoder

_SUFFIX = ".safetensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TracedImage:
    """An image of a traced prompt."""

    rows: np.ndarray[Any, np.dtype[np.int64]]
    """Index among the tokens of each image row, int64 `[rows, columns]` over the image; a thumbnail's rows are left out."""
    size: tuple[int, int]
    """(height, width) in pixels of the resized image."""

    def patches(self, values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the values of the image's rows as `[rows, columns]`, float32; `values` `[T]` are of all tokens, as in `Trace`."""
        of_tokens = np.array(values, np.float32)
        if of_tokens.ndim != 1 or len(of_tokens) <= self.rows.max():
            raise SettingError(f"values of an image must be one for each token of the trace, not of shape {list(of_tokens.shape)}")
        found: np.ndarray[Any, np.dtype[np.float32]] = of_tokens[self.rows]
        return found


@dataclass(frozen=True, slots=True)
class SavedTrace:
    """Content of a file."""

    model: str
    """The `model_kind` of the traced model."""
    token_ids: list[int]
    tokens: list[str]
    values: dict[str, Any]
    """As in `Trace`."""
    images: tuple[TracedImage, ...]


def model_kind(model: Decoder) -> str:
    """Return what traces of two models must share to be computed further by either."""
    return f"{model.model_type}, {len(model.blocks)} layers of {model.norm.weight.shape[0]} channels, {model.vocab_size} tokens"


def save(trace: SavedTrace, path: Path) -> Path:
    """Write a trace, and return the path, with its suffix. An earlier file of this name is replaced once the new one is whole. Raises
    `SettingError`."""
    target = path if path.suffix == _SUFFIX else path.with_name(path.name + _SUFFIX)
    part = target.with_name(f".{target.stem}.{os.getpid()}{_SUFFIX}")
    try:
        mx.save_safetensors(str(part), _arrays(trace))
        part.replace(target)
    except (OSError, RuntimeError) as error:
        raise SettingError(f"cannot write the trace to {target}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return target


def _arrays(trace: SavedTrace) -> dict[str, mx.array]:
    sizes = [list(image.size) for image in trace.images]
    about = {"format": _FORMAT, "model": trace.model, "tokens": trace.tokens, "images": sizes}
    found = {"token_ids": mx.array(trace.token_ids, mx.int32), "about": mx.array(np.frombuffer(json.dumps(about).encode(), np.uint8))}
    found |= {f"image.{number}.rows": mx.array(image.rows) for number, image in enumerate(trace.images)}
    for place, values in trace.values.items():
        if place == LOGITS:
            found[place] = values
            continue
        for layer, value in values.items():
            parts = dict(zip(("keys", "values"), value, strict=True)) if place == KV else {"": value}
            found |= {f"{place}.{layer}.{part}".rstrip("."): array for part, array in parts.items()}
    return found


def saved_trace(arrays: Mapping[str, mx.array]) -> SavedTrace:
    """Read the arrays of a file. Raises ValueError for arrays that are not a whole trace."""
    try:
        about = json.loads(np.array(arrays["about"], np.uint8).tobytes())
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']}")
        tokens, sizes = [str(token) for token in about["tokens"]], about["images"]
        images = [TracedImage(np.array(arrays[f"image.{number}.rows"], np.int64), (int(h), int(w))) for number, (h, w) in enumerate(sizes)]
        token_ids, model = np.array(arrays["token_ids"], np.int32).tolist(), str(about["model"])
        values = _values(arrays)
    except (KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if len(tokens) != len(token_ids) or not values:
        raise ValueError("parts are missing")
    return SavedTrace(model, token_ids, tokens, values, tuple(images))


def _values(arrays: Mapping[str, mx.array]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        place, _, rest = name.partition(".")
        if place not in TRACED:
            continue
        layer, _, part = rest.partition(".")
        if place == LOGITS:
            found[place] = array
        elif place != KV:
            found.setdefault(place, {})[int(layer)] = array
        elif part == "keys":
            found.setdefault(place, {})[int(layer)] = array, arrays[f"{place}.{layer}.values"]
    return {
        place: dict(sorted(layers.items())) if isinstance(layers, dict) else layers
        for place in TRACED
        for layers in [found.get(place)]
        if layers is not None
    }
