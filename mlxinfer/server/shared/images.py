"""Images in requests of all dialects: parts of messages, and their bytes for the engine.

A dialect makes a `SentImage` of each image. It keeps the name of its field, because errors name the part at fault. No URL is fetched and no
file is opened: an image is base64 text in the request. Only `PictureQueue` decodes, outside the event loop and few requests at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from ...errors import ImageError, MLXInferError
from ...types import Usage
from ...vision.picture import bytes_of_base64, bytes_of_url, picture_size
from ..errors import APIError, from_engine_error, invalid
from ..validation import StrictModel

T = TypeVar("T")
Detail = Literal["auto", "low", "high", "original"]
"""Share of the picture's pixels that the model gets; "original" means "high"."""
Content = Union[str, list[dict[str, Any]]]
"""Text, or text parts and image parts in their order."""
MAX_IMAGES = 64
"""Images of one request."""
_PLACE = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\](?:: )?")


class ImageSettings(StrictModel):
    """Limits of one image. `max_pixels` and `min_pixels` are areas, and not OpenAI's: Qwen's API has them in the same place."""

    detail: Detail | None = None
    max_pixels: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_pixels: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The settings in the engine's words."""
        values = {"detail": self.detail, "max_pixels": self.max_pixels, "min_pixels": self.min_pixels}
        return {name: "high" if value == "original" else value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, eq=False)
class SentImage:
    """An image of a request, not decoded yet."""

    where: str
    """Name of its part in the request, such as `messages[2].content[0]`."""
    text: str = field(repr=False)
    """Base64 or, if it starts with `data:`, a URL."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`detail`, `max_pixels` and `min_pixels`, as far as given."""

    def decoded(self) -> bytes:
        """The bytes of the file, after a check of its header. Raises `APIError`."""
        try:
            data = bytes_of_url(self.text) if _is_data_url(self.text) else bytes_of_base64(self.text)
            picture_size(data)
            return data
        except ImageError as error:
            raise image_refused(str(error), self.where) from None

    def part(self, image: object) -> dict[str, Any]:
        """A part of a message with this value of `image`."""
        return {"type": "image", "image": image, **self.settings}


def _is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def image_of_url(url: str, where: str, settings: ImageSettings | None = None) -> SentImage:
    """The image in a `data:` URL with base64, with these settings. Raises `APIError` for any other URL."""
    if not _is_data_url(url):
        try:
            bytes_of_url(url)
        except ImageError as error:
            raise image_refused(str(error), where) from None
    if not url[:2000].partition(",")[0].rstrip().lower().endswith(";base64"):
        raise image_refused("the data: URL must have base64: write data:image/png;base64,...", where)
    return SentImage(where, url, {} if settings is None else settings.given)


def sent_image(text: str, where: str) -> SentImage:
    """The image in base64 or in a `data:` URL. Raises `APIError` for any other URL and for a path."""
    if _is_data_url(text) or "://" in text[:24]:
        return image_of_url(text, where)
    return SentImage(where, text)


def image_refused(message: str, where: str) -> APIError:
    """400: the image at `where` is not accepted."""
    return invalid(f"{where}: {message}", where, "invalid_image")


def content_of(parts: Iterable[str | SentImage]) -> Content:
    """The content of a message: joined text, or a list of parts if there are images."""
    found: list[str | SentImage] = []
    for part in parts:
        if found and isinstance(part, str) and isinstance(found[-1], str):
            found[-1] += part
        elif part:
            found.append(part)
    if not any(isinstance(part, SentImage) for part in found):
        return "".join(part for part in found if isinstance(part, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else part.part(part) for part in found]


def parts_of(content: Content) -> list[str | SentImage]:
    """The texts and images of a content."""
    return [content] if isinstance(content, str) else [part["text"] if part["type"] == "text" else part["image"] for part in content]


def joined(one: Content, other: Content, between: str = "\n\n") -> Content:
    """Both contents, with `between` between two texts that are not empty."""
    first, second = parts_of(one), parts_of(other)
    texts = first and second and first[-1] and second[0] and isinstance(first[-1], str) and isinstance(second[0], str)
    return content_of([*first, *([between] if texts else ()), *second])


def sent_images(messages: Sequence[Mapping[str, Any]]) -> list[SentImage]:
    """The images of a conversation, in order. Raises `APIError` for too many."""
    found = [part for message in messages for part in parts_of(message.get("content") or "") if isinstance(part, SentImage)]
    if len(found) > MAX_IMAGES:
        raise image_refused(f"the request has {len(found)} images, and at most {MAX_IMAGES} are accepted", found[MAX_IMAGES].where)
    return found


def decoded(images: Iterable[SentImage]) -> dict[SentImage, bytes]:
    """The bytes of these images. Decodes base64: do not call on the event loop. Raises `APIError`."""
    return {image: image.decoded() for image in images}


def with_bytes(messages: Sequence[Mapping[str, Any]], files: Mapping[SentImage, bytes]) -> Sequence[Mapping[str, Any]]:
    """The messages as the engine reads them, with these bytes for their images."""
    return [{**message, "content": _with_bytes(message["content"], files)} if "content" in message else message for message in messages]


def _with_bytes(content: Content, files: Mapping[SentImage, bytes]) -> Content:
    if isinstance(content, str):
        return content
    return [part["image"].part(files[part["image"]]) if part["type"] == "image" else part for part in content]


def with_places(error: MLXInferError, messages: Sequence[Mapping[str, Any]]) -> APIError:
    """The response to an error of the engine that names a part of these messages, with the name of the part in the request."""
    place = _PLACE.match(str(error))
    if place is None or not isinstance(error, ImageError):
        return from_engine_error(error)
    number, index = int(place[1]), int(place[2])
    content = messages[number].get("content") if number < len(messages) else None
    part = content[index]["image"] if isinstance(content, list) and index < len(content) and content[index]["type"] == "image" else None
    rest = str(error)[place.end() :]
    return image_refused(rest, part.where) if isinstance(part, SentImage) else from_engine_error(error)


class Resized(TypedDict):
    """An image that the model sees in another size: (width, height) of the picture and of the image. Coordinates in an answer may refer
    to the second."""

    image: int
    picture: tuple[int, int]
    seen: tuple[int, int]


class ImageTimings(TypedDict):
    """Times of the images of a request. `images_cached` needed no vision tower."""

    images: int
    images_cached: int
    image_decode_ms: float
    image_encode_ms: float
    resized: list[Resized]


class WithTimings(TypedDict):
    """The field with the times of images, which answers to text do not have."""

    timings: NotRequired[ImageTimings]


def timings_of(usages: Iterable[Usage]) -> WithTimings:
    """The times of a prompt's images, from the usages of its answers; empty for a prompt without images."""
    stats = next((usage.stats for usage in usages), None)
    if stats is None or not stats.images:
        return {}
    sizes = enumerate(stats.image_sizes)
    timings = ImageTimings(
        images=stats.images,
        images_cached=stats.images_cached,
        image_decode_ms=round(stats.image_decode_s * 1000, 1),
        image_encode_ms=round(stats.image_encode_s * 1000, 1),
        resized=[Resized(image=number, picture=given, seen=seen) for number, (given, seen) in sizes if given != seen],
    )
    return {"timings": timings}


class PictureQueue:
    """Runs the work of requests with images, few at once, so that pictures cannot starve text."""

    def __init__(self, at_once: int = 2, waiting: int = 32) -> None:
        """`waiting`: requests that may wait; further ones are refused."""
        self._turns = asyncio.Semaphore(at_once)
        self._most = at_once + waiting
        self._open = 0

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`. Raises `APIError` (429) if the queue is full. Work that has started ends before its place is free, even if
        its request is cancelled: a thread cannot be stopped."""
        if self._open >= self._most:
            raise APIError(429, "rate_limit", "Too many requests with images are waiting: send this one again later.", code="queue_full")
        self._open += 1
        started = asyncio.Event()
        task = asyncio.ensure_future(self._turn(work, started))
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not started.is_set():
                task.cancel()
            raise

    async def _turn(self, work: Callable[[], Coroutine[Any, Any, T]], started: asyncio.Event) -> T:
        async with self._turns:
            started.set()
            return await work()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._open -= 1
        if not task.cancelled():
            task.exception()  # the request may be gone, and asyncio logs exceptions that nobody reads
