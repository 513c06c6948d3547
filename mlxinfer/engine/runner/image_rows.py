"""Rows of images in a step: their ids, positions, spans and features."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from ...cache.base import GivenRows, Segment
from ...vision.inputs import PromptImages
from ..core.feature_cache import FeatureCache
from ..core.schedule import ScheduledSequence

ImageRows = tuple[PromptImages, Segment]
"""Images of a sequence, and its rows in a step, some of which are image rows."""


def known_ids(images: PromptImages, ids: list[int], past: int) -> list[int]:
    """Replace the ids of image rows by 0, which every embedding has. `ids` follow `past` others."""
    for first, end in _image_rows(images, past, past + len(ids)):
        ids[first - past : end - past] = [0] * (end - first)
    return ids


def image_segment(w: ScheduledSequence, start: int, read: int) -> Segment:
    """Return the segment of a sequence with images."""
    s, images = w.sequence, w.sequence.images
    assert images is not None
    assert s.slot is not None
    past = s.num_computed_tokens
    end = past + w.count
    rope = None
    if images.rope is not None and past < (last := images.runs[-1]).start + last.count:
        rope = images.rope[:, past:end]
        if end > (prompt := len(s.prompt)):
            rope = np.concatenate([rope, np.broadcast_to(np.arange(prompt, end, dtype=np.int32) + images.shift, (3, end - prompt))], axis=1)
        rope = np.ascontiguousarray(rope, dtype=np.int32)
    spans = tuple(span for span in images.spans if span[0] < end and past < span[1])
    assert all(past <= first and last <= end for first, last in spans), "a chunk cuts a span"
    return Segment(s.slot, start, w.count, past, max(s.rope_length, end), w.num_drafts, read, images.shift, rope, spans)


def has_image_rows(images: PromptImages, segment: Segment) -> bool:
    """True if rows of a segment are image rows."""
    return bool(_image_rows(images, segment.past, segment.past + segment.count))


def given_rows(parts: Many[ImageRows], features: FeatureCache) -> GivenRows:
    """Return the features of all image rows of a step."""
    rows: list[int] = []
    found: list[mx.array] = []
    deepstack: list[tuple[mx.array, ...]] = []
    for images, segment in parts:
        past, end = segment.past, segment.past + segment.count
        for run in images.runs:
            first, last = max(run.start, past), min(run.start + run.count, end)
            if first >= last:
                continue
            encoded = features[images.images[run.image].digest]
            own = slice(run.first + first - run.start, run.first + last - run.start)
            rows += range(segment.start + first - past, segment.start + last - past)
            found.append(encoded.features[own])
            deepstack.append(tuple(layer[own] for layer in encoded.deepstack))
    joined = _joined(found)
    assert joined.shape[0] == len(rows), "every image row needs one row of features"
    return GivenRows(mx.array(rows, dtype=mx.int32), joined, tuple(_joined(layers) for layers in zip(*deepstack, strict=True)))


def _joined(arrays: Many[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays))


def _image_rows(images: PromptImages, past: int, end: int) -> list[tuple[int, int]]:
    """Image rows [first, end) between two indices."""
    return [
        (max(run.start, past), min(run.start + run.count, end)) for run in images.runs if run.start < end and past < run.start + run.count
    ]
