"""Messages of callers: their text for chat templates, and their images with the places that error messages name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, Union

from ...errors import ImageError, PromptError
from ...util.dataclass import dataclass
from ...vision.processor import Budget
from ...vision.prompt import joined_text_parts

Messages = Union[str, Many[Mapping[str, Any]]]
"""A conversation of `{"role": ..., "content": ...}`. The content is text or a list of parts; text alone is the user's first message.

Parts are `{"type": "text", "text": ...}`, and images: `{"type": "image", "image": ...}` with a path, bytes, a PIL image or a uint8 array,
or `{"type": "image_url", "image_url": {"url": "data:..."}}`. An image may have `detail`, `max_pixels` and `min_pixels`."""

MOST_IMAGES = 64
"""Maximum images of a request."""
_EXAMPLE = '{"type": "image", "image": "picture.png"}'
_PLACE = {"type": "image"}
"""An image as templates see it."""
_MISSING = object()


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as given by a caller, not read yet."""

    where: str
    """Its place for error messages, such as "messages[2].content[0]"."""
    source: Any
    """Path, bytes, `data:` URL, PIL image, uint8 array or `Picture`."""
    limits: Mapping[str, Any]
    """Fields of `Budget` that the caller set for this image."""
    only_data: bool = False
    """True if text may only be a `data:` URL."""

    def budget(self, common: Budget) -> Budget:
        """Return the limits of this image: its own within the common ones. Raises `SettingError`."""
        if not self.limits:
            return common
        own = Budget(**self.limits)
        most = min((each for each in (own.max_pixels, common.max_pixels) if each is not None), default=None)
        least = own.min_pixels if own.min_pixels is not None else common.min_pixels
        least = least if least is None or most is None else min(least, most)
        detail = common.detail if own.detail == "auto" else own.detail
        return replace(common, max_pixels=most, min_pixels=least, detail=detail)


def read_messages(messages: Messages, images: Iterable[Any] = ()) -> tuple[list[Mapping[str, Any]], list[ImagePart]]:
    """Return the messages with content for templates, and their images in order.

    A content without images becomes text. `images` fill parts `{"type": "image"}` that have no image, in order. Without such parts they
    come first in the last user message. Raises `PromptError`, and `ImageError` for other kinds of parts.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif isinstance(messages, Mapping):
        raise PromptError('messages must be a list, such as [{"role": "user", "content": "Hello"}]')
    more = [ImagePart(f"images[{number}]", source, {}) for number, source in enumerate(listed(images))]
    found: list[ImagePart] = []
    plain = [_read(message, f"messages[{number}]", found) for number, message in enumerate(messages)]
    empty = [number for number, part in enumerate(found) if part.source is _MISSING]
    if empty and len(empty) != len(more):
        if more:
            raise ImageError(
                f'{found[empty[0]].where}: {len(more)} images are given for {len(empty)} parts {{"type": "image"}}: one for each'
            )
        raise ImageError(f'{found[empty[0]].where}: "image" is missing: write {_EXAMPLE}')
    for number, part in zip(empty, more, strict=False):
        found[number] = replace(part, limits=found[number].limits)
    if more and not empty:
        plain, found = _with_images(plain, found, more)
    if len(found) > MOST_IMAGES:
        raise ImageError(f"{found[MOST_IMAGES].where}: a request may have {MOST_IMAGES} images, not {len(found)}")
    return plain, found


def listed(images: Iterable[Any]) -> list[Any]:
    """Return the images of `images=[...]`. Raises `ImageError` for a single one."""
    single = isinstance(images, (str, bytes, bytearray, Mapping)) or not isinstance(images, Iterable) or hasattr(images, "ndim")
    if single:
        raise ImageError("images must be a list of images, such as images=[picture]")
    return list(images)


def _with_images(
    messages: list[Mapping[str, Any]], found: list[ImagePart], more: list[ImagePart]
) -> tuple[list[Mapping[str, Any]], list[ImagePart]]:
    """Put images first in the last user message."""
    last = next((number for number in reversed(range(len(messages))) if messages[number].get("role") == "user"), None)
    if last is None:
        raise ImageError("images: there is no user message to put them in")
    before = sum(_count(message.get("content")) for message in messages[:last])
    content = messages[last].get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    put = {**messages[last], "content": [*[_PLACE] * len(more), *parts]}
    return [*messages[:last], put, *messages[last + 1 :]], [*found[:before], *more, *found[before:]]


def _count(content: Any) -> int:
    return sum(part["type"] == "image" for part in content) if isinstance(content, list) else 0


def _read(message: Mapping[str, Any], where: str, found: list[ImagePart]) -> Mapping[str, Any]:
    """Return the message for templates, and append its images to `found`."""
    if not isinstance(message, Mapping):
        raise PromptError(f'{where} must be a dict, such as {{"role": "user", "content": "Hello"}}, not a {type(message).__name__}')
    parts = message.get("content")
    if not isinstance(parts, (list, tuple)):
        return message
    read = joined_text_parts([_part(part, f"{where}.content[{number}]", found) for number, part in enumerate(parts)])
    if all(part["type"] == "text" for part in read):
        return {**message, "content": "".join(part["text"] for part in read)}
    return {**message, "content": read}


def _part(part: Any, where: str, found: list[ImagePart]) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise PromptError(f'{where} is a {type(part).__name__}, and must be a part such as {{"type": "text", "text": "Hello"}}')
    kind = part.get("type", "text")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in ("image", "image_url"):
        found.append(_image(part, where))
        return _PLACE
    if kind == "text":
        raise PromptError(f'{where}: "text" must be a text')
    raise ImageError(f"{where} is {kind!r}: only text and images can be read")


def _image(part: Mapping[str, Any], where: str) -> ImagePart:
    limits = {name: part[name] for name in ("detail", "max_pixels", "min_pixels") if part.get(name) is not None}
    if part.get("type") == "image":
        return ImagePart(where, part.get("image", _MISSING), limits)
    url = part.get("image_url")
    if isinstance(url, Mapping):
        limits |= {"detail": url["detail"]} if url.get("detail") is not None else {}
        url = url.get("url")
    if not isinstance(url, str):
        raise ImageError(f'{where}: "image_url" must be {{"url": "data:image/png;base64,..."}}')
    return ImagePart(where, url, limits, only_data=True)


def marked_messages(messages: Many[Mapping[str, Any]], mark: str, roles: frozenset[str] | None) -> list[Mapping[str, Any]]:
    """Return messages of text in which `mark` stands for each image, for templates that take no lists of parts.

    Only messages of `roles` are changed; None means all.
    """
    return [_marked(message, mark) if roles is None or message.get("role") in roles else message for message in messages]


def _marked(message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(mark if part["type"] == "image" else str(part["text"]) for part in content)}
