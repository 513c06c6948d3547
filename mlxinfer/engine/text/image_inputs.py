"""Images of a request: read, planned by size, rendered into the prompt, and pre-processed.

Sizes come from headers, so a prompt that is too long is refused before a picture is decoded. Pre-processed images are cached by their
bytes, because clients send a conversation's pictures again in every turn.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any
from urllib.parse import unquote, urlsplit

from ...errors import ImageError, MLXInferError, PromptError, SettingError, TemplateError
from ...tokenizer.tokenizer import Tokenizer
from ...util.dataclass import dataclass
from ...vision.inputs import ImageInput, PromptImages
from ...vision.picture import Picture, bytes_of_url, picture_size, read_file, read_picture
from ...vision.processor import Budget, ImageProcessor, Layout
from ...vision.prompt import expanded
from .chat_prompt import ChatPrompt
from .message_parts import ImagePart, marked_messages

_log = logging.getLogger(__name__)
_CACHED_BYTES = 64 << 20
"""Maximum bytes of the pixels in `ImageCache`."""
_ROLES: tuple[frozenset[str] | None, ...] = (frozenset({"tool", "assistant", "system", "developer"}), None)
"""Roles whose images are rendered within text, if the template shows no lists: one choice after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedImage:
    """An image whose size is known, perhaps not decoded yet."""

    where: str
    content: bytes | Picture
    budget: Budget
    layout: Layout


@dataclass(frozen=True, slots=True)
class TokensWithImages:
    """A prompt that is not a chat, with its images."""

    token_ids: list[int]
    images: PromptImages


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation, with its images, which are not decoded yet."""

    prompt: ChatPrompt
    images: list[PlannedImage]


class ImageCache:
    """The images used last, pre-processed, by the digest of their bytes and their limits. Thread-safe."""

    def __init__(self, limit: int = _CACHED_BYTES) -> None:
        """Create a cache of at most `limit` bytes of pixels."""
        self._limit = limit
        self._bytes = 0
        self._found: OrderedDict[tuple[bytes, Budget], ImageInput] = OrderedDict()
        self._lock = Lock()

    def get(self, key: tuple[bytes, Budget]) -> ImageInput | None:
        """Return the image of this key; None if it is not cached."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, key: tuple[bytes, Budget], image: ImageInput) -> None:
        """Add an image, and remove those that were not used for longest."""
        with self._lock:
            if key in self._found or image.pixels.values.nbytes > self._limit:
                return
            self._found[key] = image
            self._bytes += image.pixels.values.nbytes
            while self._bytes > self._limit:
                self._bytes -= self._found.popitem(last=False)[1].pixels.values.nbytes


def plan(part: ImagePart, processor: ImageProcessor, common: Budget) -> PlannedImage:
    """Read an image and plan it, without decoding a file. Raises `ImageError` that names the part."""
    try:
        budget, content = part.budget(common), _content(part)
        size = picture_size(content) if isinstance(content, bytes) else content.size
        return PlannedImage(part.where, content, budget, processor.plan(size, budget))
    except (ImageError, SettingError) as error:
        raise ImageError(f"{part.where}: {error}") from None


def _content(part: ImagePart) -> bytes | Picture:
    """Return the bytes of a file, or the picture of an object in memory. Raises `ImageError`."""
    source = part.source
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if isinstance(source, Picture):
        return source
    if not isinstance(source, (str, Path)):
        return read_picture(source)
    text = str(source)
    if part.only_data or text[:5].lower() == "data:":
        return bytes_of_url(text)
    if text[:7].lower() == "file://":
        return read_file(Path(unquote(urlsplit(text).path)))
    return bytes_of_url(text) if "://" in text[:16] else read_file(Path(os.path.expanduser(text)))


def prepare(planned: PlannedImage, processor: ImageProcessor, cache: ImageCache) -> ImageInput:
    """Decode and resize an image, unless it is cached. Raises `ImageError` that names the part."""
    content = planned.content
    digest = content.digest if isinstance(content, Picture) else hashlib.blake2b(content, digest_size=32, person=b"file").digest()
    key = digest, planned.budget
    found = cache.get(key)
    if found is not None:
        return found
    began = perf_counter()
    try:
        picture = content if isinstance(content, Picture) else read_picture(content)
        found = ImageInput.of(processor.pixels(picture, planned.budget))
    except MLXInferError as error:
        raise ImageError(f"{planned.where}: {error}") from None
    if picture.first_frame_only:
        _log.info("%s: only the first frame of the animation is used", planned.where)
    if note := found.layout.note():
        _log.info("%s: %s", planned.where, note)
    _log.debug("%s: image %s prepared in %.1f ms", planned.where, found.digest.hex()[:12], 1e3 * (perf_counter() - began))
    cache.put(key, found)
    return found


def encode_with_images(
    tokenizer: Tokenizer,
    messages: Many[Mapping[str, Any]],
    processor: ImageProcessor,
    layouts: Many[Layout],
    **template: Any,
) -> list[int]:
    """Return the token ids of a conversation with each image's placeholder expanded.

    Messages have lists of parts. A template that does not show an image of a list gets text instead, with the placeholder in its place.
    Raises `PromptError` and `TemplateError`.
    """

    def encoded(given: Many[Mapping[str, Any]], mark: str, markup: str) -> list[int]:
        def expand(text: str) -> str:
            return expanded(text.replace(mark, markup) if mark else text, processor, layouts)

        return tokenizer.encode_chat(given, expand=expand, **template)

    try:
        return encoded(messages, "", "")
    except (PromptError, TemplateError) as error:
        mark = f"image{secrets.token_hex(8)}"
        for roles in _ROLES:
            try:
                return encoded(marked_messages(messages, mark, roles), mark, _markup(tokenizer, processor))
            except (PromptError, TemplateError):
                continue
        raise error


def _markup(tokenizer: Tokenizer, processor: ImageProcessor) -> str:
    """Return the text that the template renders for an image between two texts of a user message."""
    before, after = (f"text{secrets.token_hex(4)}" for _ in range(2))
    content = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
    try:
        rendered = tokenizer.render_chat([{"role": "user", "content": content}])
    except TemplateError:
        return processor.in_text
    between = rendered.partition(before)[2].partition(after)[0]
    return between if between.count(processor.placeholder) == 1 else processor.in_text
