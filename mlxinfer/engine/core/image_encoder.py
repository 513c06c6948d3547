"""Runs the vision tower between steps, for the images that running sequences need next.

A sequence is admitted before its images are encoded: images within its cached prefix need no tower. Its chunks end before the first image
without features (`Sequence.readable`), and other sequences continue meanwhile. The tower runs in slices of a few blocks, so that the tokens
of others are late by one slice at most.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Sequence as Many
from itertools import groupby
from time import perf_counter

import mlx.core as mx
import numpy as np

from ...cache.pages import PAGE
from ...errors import EngineError, MLXInferError, one_line
from ...models.towers.tower import Encoded, Size, Tower
from ...util.dataclass import dataclass
from ...util.device import clear_cache, is_gpu
from ...vision.inputs import ImageInput, PromptImages
from ...vision.processor import Pixels
from .feature_cache import FeatureCache
from .sequence import ALL, IMAGE_FAILED, Sequence

_KNOWN_SIZES = 256
"""Sizes whose time per block is kept."""


@dataclass(frozen=True, slots=True)
class _Need:
    """An image that a sequence needs."""

    number: int
    """Index of the image in the prompt."""
    image: ImageInput
    first: int
    """Index of its first row."""
    end: int
    """Index after its last row."""


class _Job:
    """An image in the tower."""

    def __init__(self, tower: Tower, image: ImageInput, dtype: mx.Dtype) -> None:
        self.digest = image.digest
        self.passes = passes(image.pixels)
        self.pixels = max(sum(height * width for height, width in sizes) for _, _, sizes in self.passes)
        """Pixels of the largest pass."""
        self._stages = _encode(tower, image.pixels, self.passes, dtype)

    def advance(self, blocks: int) -> Encoded | None:
        """Compute up to so many blocks. Returns the evaluated features at the end."""
        rows: mx.array | None = None
        try:
            for _ in range(blocks):
                rows = next(self._stages)
        except StopIteration as end:
            encoded: Encoded = end.value
            mx.eval(encoded.features, encoded.deepstack)
            return encoded
        mx.eval(rows)
        return None


class ImageEncoder:
    """The tower, its queue, and the features of images. It belongs to the thread of the engine."""

    def __init__(self, tower: Tower, dtype: mx.Dtype, limit: int, *, whole_pages: bool = False) -> None:
        """`dtype`: of the features. `limit`: bytes of features (`FeatureCache`). `whole_pages`: no chunk of text ends within a page because
        an image is missing."""
        self.features = FeatureCache(limit)
        self._step = PAGE if whole_pages else 1
        self.busy = False
        """True if a sequence needs features that are not in a submitted step yet. `due` must then be called between steps."""
        self._tower, self._dtype = tower, dtype
        self._users: dict[Sequence, list[_Need]] = {}
        """Images that each sequence still needs, in order. Their features are pinned."""
        self._job: _Job | None = None
        self._block_s: dict[int, float] = {}
        """Seconds per block, by the pixels of a pass."""

    def reset(self) -> None:
        """Forget all sequences, which have lost their slots. Features stay."""
        for sequence in list(self._users):
            self._leave(sequence)
        self._job, self.busy = None, False

    def begin(self, sequence: Sequence) -> None:
        """Note the images that a sequence needs after it got a slot: those that end after its computed tokens."""
        images = sequence.images
        assert images is not None
        self._leave(sequence)
        needs = [need for need in _needs(images) if need.end > sequence.num_computed_tokens]
        sequence.count_cached_images(len(images.images) - sum(need.image.digest not in self.features for need in needs))
        for need in needs:
            self.features.pin(need.image.digest)
        if needs:
            self._users[sequence] = needs
            self.busy = True
        self._update(sequence)

    def due(self) -> bool:
        """True if `run` has something to compute now. Features that nobody needs any more are unpinned."""
        for sequence, needs in list(self._users.items()):
            if sequence.slot is None or sequence.finish_reason:
                self._leave(sequence)
                continue
            while needs and needs[0].end <= sequence.num_computed_tokens:
                self.features.unpin(needs.pop(0).image.digest)
            if not needs:
                del self._users[sequence]
        self.busy = bool(self._users)
        if self._job is not None and not any(True for _ in self._waiting_for(self._job.digest)):
            self._job = None
        if self._job is None and (image := self._next()) is not None:
            self._job = _Job(self._tower, image, self._dtype)
        return self._job is not None

    def waits(self, sequence: Sequence) -> bool:
        """True if a sequence cannot continue without an image."""
        return sequence in self._users and sequence.num_computed_tokens >= sequence.readable

    def run(self, slice_s: float) -> list[tuple[Sequence, str]]:
        """Compute for about `slice_s` seconds, at least one block. Returns the sequences whose image failed, each with the error."""
        job, began = self._job, perf_counter()
        assert job is not None
        known = self._block_s.get(job.pixels)
        blocks = 1 if known is None else max(1, int(min(slice_s / max(known, 1e-6), 1e6)))
        try:
            encoded = job.advance(blocks)
        except (RuntimeError, MemoryError, ValueError, MLXInferError) as error:  # memory, mostly
            self._job = None
            clear_cache()
            return [(sequence, _failure(need, error)) for sequence, need in self._waiting_for(job.digest)]
        seconds = perf_counter() - began
        for sequence in {sequence for sequence, _ in self._waiting_for(job.digest)}:
            sequence.count_encoding(seconds)
        if encoded is None:
            if len(self._block_s) >= _KNOWN_SIZES:
                self._block_s.clear()
            self._block_s[job.pixels] = seconds / blocks
            return []
        self._job = None
        self.features.put(job.digest, encoded)
        for sequence in self._users:
            self._update(sequence)
        return []

    def _next(self) -> ImageInput | None:
        """The next image to encode: of the first sequence that lacks one.

        Features that wait to be read are bounded: beyond the limit, only a sequence that cannot continue gets its image. If it is the
        first of all, it frees pages for the others by going on.
        """
        users = sorted(self._users, key=lambda s: (s.priority, s.arrival))
        missing = ((s, need.image) for s in users for need in self._users[s] if need.image.digest not in self.features)
        sequence, image = next(missing, (None, None))
        if sequence is None or self.waits(sequence) or self.features.pinned_bytes < self.features.limit:
            return image
        return None

    def _waiting_for(self, digest: bytes) -> Iterator[tuple[Sequence, _Need]]:
        for sequence, needs in self._users.items():
            found = next((need for need in needs if need.image.digest == digest), None)
            if found is not None:
                yield sequence, found

    def _update(self, sequence: Sequence) -> None:
        """Set how far the sequence can be computed."""
        needs = self._users.get(sequence, ())
        missing = (need.first for need in needs if need.image.digest not in self.features)
        sequence.read_up_to(next((first // self._step * self._step for first in missing), ALL))

    def _leave(self, sequence: Sequence) -> None:
        for need in self._users.pop(sequence, ()):
            self.features.unpin(need.image.digest)


def _needs(images: PromptImages) -> list[_Need]:
    """The images of a prompt in order, with their rows."""
    found = []
    for number, group in groupby(images.runs, key=lambda run: run.image):
        runs = list(group)
        found.append(_Need(number, images.images[number], runs[0].start, runs[-1].start + runs[-1].count))
    return found


def _failure(need: _Need, error: Exception) -> str:
    height, width = need.image.layout.resized
    what = f"image {need.number + 1} of the prompt ({width} x {height} pixels, {need.image.layout.tokens} tokens)"
    return f"{IMAGE_FAILED}{what} could not be encoded: {one_line(error)}; scale it down with max_pixels"


Pass = tuple[int, int, "tuple[Size, ...]"]
"""Rows [first, end) of `Pixels.values` that go through the tower together, and the sizes of their pieces."""


def passes(pixels: Pixels) -> list[Pass]:
    """Divide the pieces of an image. A pass depends on the image alone, so that its features do not depend on what else runs."""
    most = (1 << 20) if is_gpu() else (1 << 18)
    pieces, rows = pixels.layout.pieces, len(pixels.values)
    whole = sum(height * width for height, width in pieces)
    found: list[Pass] = []
    first, area, taken = 0, 0, 0
    own: list[Size] = []
    for place, (height, width) in enumerate(pieces):
        own.append((height, width))
        area += height * width
        following = pieces[place + 1] if place + 1 < len(pieces) else None
        if following is None or area + following[0] * following[1] > most:
            taken += area
            end = rows * taken // whole
            found.append((first, end, tuple(own)))
            first, area, own = end, 0, []
    return found


def _encode(tower: Tower, pixels: Pixels, divided: Many[Pass], dtype: mx.Dtype) -> Generator[mx.array, None, Encoded]:
    """Encode an image. Yields rows to evaluate after each block and each pass."""
    parts: list[Encoded] = []
    for first, end, sizes in divided:
        part = yield from tower.stages(device_pixels(pixels, first, end), sizes)
        part = Encoded(part.features.astype(dtype), tuple(rows.astype(dtype) for rows in part.deepstack))
        mx.eval(part.deepstack)
        yield part.features
        parts.append(part)
    if (found := sum(part.features.shape[0] for part in parts)) != pixels.layout.tokens:
        raise EngineError(f"the vision tower gave {found} rows instead of {pixels.layout.tokens}")
    if len(parts) == 1:
        return parts[0]
    deepstack = zip(*(part.deepstack for part in parts), strict=True)
    return Encoded(mx.concatenate([part.features for part in parts]), tuple(mx.concatenate(list(rows)) for rows in deepstack))


def device_pixels(pixels: Pixels, first: int, end: int) -> mx.array:
    """Return rows [first, end) of `Pixels.normalized`: float32, looked up on the device."""
    values = np.ascontiguousarray(pixels.values[first:end])
    channels = [1] * values.ndim
    channels[pixels.channel_axis] = 3
    places = mx.array(values).astype(mx.int32) + mx.array([0, 256, 512], dtype=mx.int32).reshape(channels)
    found = mx.array(pixels.table.reshape(-1))[places]
    if pixels.frames > 1:
        found = mx.repeat(mx.expand_dims(found, 2), pixels.frames, axis=2)
    return found.reshape(end - first, -1) if pixels.flat else found
