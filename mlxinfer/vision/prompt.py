"""Images in a prompt: expansion of the rendered template, the image rows among the token ids, and their rotary positions.

A chat template renders one placeholder for each image. Processors replace it in the text, before tokenization, because neighbours may
merge. Token ids are never spliced. A placeholder that a user spells stays text: `Tokenizer.encode_chat` puts a mark into it, so `expanded`
does not find it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import numpy as np

from ..errors import PromptError
from ..util.dataclass import dataclass
from .processor import ImageProcessor, Layout, Size

Positions = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class ImageRun:
    """Consecutive rows of a prompt that take image features instead of embeddings."""

    start: int
    """Index of the first row among the token ids."""
    count: int
    """Number of rows."""
    image: int
    """Index of the image in the prompt."""
    first: int
    """Index of the first row's feature among the features of that image."""
    kind: Literal["image"] = "image"


def joined_text_parts(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts of a message with neighbouring text parts joined.

    Special tokens are marked in each string, so a token that a user spells across two parts would not be found.
    """
    joined: list[Mapping[str, Any]] = []
    for part in parts:
        if joined and part.get("type") == joined[-1].get("type") == "text":
            joined[-1] = {**joined[-1], "text": f"{joined[-1]['text']}{part['text']}"}
        else:
            joined.append(part)
    return joined


def expanded(text: str, processor: ImageProcessor, layouts: Sequence[Layout], *, chat: bool = True) -> str:
    """Return the text with each placeholder expanded. Raises `PromptError` unless there is one for each image.

    `chat`: the text is a rendered conversation, and not a prompt that the user wrote.
    """
    pieces = text.split(processor.placeholder)
    if len(pieces) - 1 != len(layouts):
        found = f"{len(pieces) - 1} image placeholders ({processor.placeholder}) for {len(layouts)} images"
        if not chat:
            raise PromptError(f"the prompt has {found}: write one for each image, in its place")
        raise PromptError(f"the chat template rendered {found}: every image must be a part of a message that the template shows")
    parts = [pieces[0]]
    for layout, piece in zip(layouts, pieces[1:], strict=True):
        parts += [processor.expansion(layout), piece]
    return "".join(parts)


def image_runs(ids: Sequence[int], image_token_id: int, layouts: Sequence[Layout]) -> list[ImageRun]:
    """Return the runs of image rows among the token ids, in order. Raises `PromptError` unless they are those of the layouts."""
    found: list[tuple[int, int]] = []
    place = 0
    for is_image, group in groupby(ids, image_token_id.__eq__):
        count = sum(1 for _ in group)
        if is_image:
            found.append((place, count))
        place += count
    wanted = [(image, count) for image, layout in enumerate(layouts) for count in layout.counts]
    if [count for _, count in found] != [count for _, count in wanted]:
        raise PromptError(
            f"the prompt has {sum(count for _, count in found)} image rows in {len(found)} runs, but its images need "
            f"{sum(count for _, count in wanted)} in {len(wanted)}: the tokenizer does not fit the image processor"
        )
    runs: list[ImageRun] = []
    for (start, count), (image, _) in zip(found, wanted, strict=True):
        first = runs[-1].first + runs[-1].count if runs and runs[-1].image == image else 0
        runs.append(ImageRun(start, count, image, first))
    return runs


def rope_positions(length: int, runs: Sequence[ImageRun], grids: Sequence[Size]) -> tuple[Positions, int]:
    """Return Qwen's positions (M-RoPE) int32 [3, length] (time, row, column), and the delta: later rows have position index + delta.

    Text advances all axes by one. Image rows that start at position s have time s, row s + r and column s + c; the next text starts at s
    plus the longer side of the grid. Source: `get_rope_index` of qwen2_vl, qwen2_5_vl, qwen3_vl and qwen3_5 in transformers 5.24, stills.

    `grids` are the (rows, columns) of image rows by image, `Layout.grid`. Raises `ValueError` unless each run is a whole image.
    """
    positions = np.empty((3, length), np.int32)
    place, position = 0, 0
    for run in runs:
        rows, columns = grids[run.image]
        if run.first or run.count != rows * columns or run.start < place or run.start + run.count > length:
            raise ValueError(f"run {run} does not fit a grid of {rows} x {columns} in {length} rows")
        positions[:, place : run.start] = np.arange(position, position + run.start - place)
        position += run.start - place
        image = positions[:, run.start : run.start + run.count].reshape(3, rows, columns)
        image[0] = position
        image[1] = position + np.arange(rows)[:, None]
        image[2] = position + np.arange(columns)
        positions[:, run.start : run.start + run.count] = image.reshape(3, -1)
        place, position = run.start + run.count, position + max(rows, columns)
    positions[:, place:] = np.arange(position, position + length - place)
    return positions, position + length - place - length
