"""Rows of images in a step: their ids, positions, spans and features."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from ...cache.base import GivenRows, Segment
from ...vision.inputs import PromptImages
from ..core.feature_cache import FeatureCache
from ..core.schedule import ScheduledSequence

PartOfPrompt = tuple[PromptImages, Segment]
"""Images of a sequence, and its segment in a step."""


class ImageRows:
    """Lays out the rows of sequences with images, for `ModelRunner`."""

    def __init__(self, features: FeatureCache) -> None:
        self._features = features

    def ids(self, images: PromptImages, ids: list[int], past: int) -> list[int]:
        """Replace the ids of image rows by 0, which every embedding has. `ids` follow `past` others."""
        for first, end in _parts(images, past, past + len(ids)):
            ids[first - past : end - past] = [0] * (end - first)
        return ids

    def segment(self, w: ScheduledSequence, start: int, read: int) -> Segment:
        """Return the segment of a sequence with images: rotary positions as far as they are not the index plus `shift`, and whole spans."""
        s, images = w.sequence, w.sequence.images
        assert images is not None
        assert s.slot is not None
        past, end, last = s.num_computed_tokens, s.num_computed_tokens + w.count, images.runs[-1]
        rope = None if images.rope is None or past >= last.start + last.count else _positions(images.rope, images.shift, past, end)
        spans = tuple(span for span in images.spans if span[0] < end and past < span[1])
        assert all(past <= first and last <= end for first, last in spans), "a chunk cuts a span"
        return Segment(s.slot, start, w.count, past, max(s.rope_length, end), w.num_drafts, read, images.shift, rope, spans)

    def given(self, parts: Many[PartOfPrompt]) -> GivenRows | None:
        """Return the features of all image rows of a step; None without any."""
        rows: list[int] = []
        found: list[mx.array] = []
        deepstack: list[tuple[mx.array, ...]] = []
        for images, segment in parts:
            past, end = segment.past, segment.past + segment.count
            for run in images.runs:
                first, last = max(run.start, past), min(run.start + run.count, end)
                if first < last:
                    encoded = self._features[images.images[run.image].digest]
                    own = slice(run.first + first - run.start, run.first + last - run.start)
                    rows += range(segment.start + first - past, segment.start + last - past)
                    found.append(encoded.features[own])
                    deepstack.append(tuple(layer[own] for layer in encoded.deepstack))
        if not rows:
            return None
        features = _joined(found)
        assert features.shape[0] == len(rows), "every image row needs one row of features"
        return GivenRows(mx.array(rows, dtype=mx.int32), features, tuple(_joined(layers) for layers in zip(*deepstack, strict=True)))


def _positions(rope: np.ndarray, shift: int, past: int, end: int) -> np.ndarray:
    """Rotary positions int32 `[3, end - past]` of a prompt's rows, and of the rows of its answer."""
    known = rope.shape[1]
    later = np.broadcast_to(np.arange(max(known, past), end, dtype=np.int32) + shift, (3, max(end - max(known, past), 0)))
    return np.ascontiguousarray(np.concatenate([rope[:, past:end], later], axis=1), dtype=np.int32)


def _joined(arrays: Many[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays))


def _parts(images: PromptImages, past: int, end: int) -> list[tuple[int, int]]:
    """Image rows [first, end) between two indices."""
    found = [(max(run.start, past), min(run.start + run.count, end)) for run in images.runs]
    return [(first, last) for first, last in found if first < last]
