"""Picture files of the user: read and checked by their headers before a model is loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ImageError, one_line
from ..remote.remote_model import RemoteModel

if TYPE_CHECKING:
    from ...engine.llm import LLM

STDIN = "-"
"""Name of standard input as a picture file."""
_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".jpe", ".webp", ".gif", ".bmp", ".heic", ".heif", ".avif", ".tif", ".tiff"))
"""Names of pictures. Those of formats that cannot be read are refused with advice, instead of being sent as text."""


def is_picture(path: Path) -> bool:
    """Return True if the name of a file is that of a picture."""
    return path.suffix.lower() in _SUFFIXES


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture file in memory."""

    name: str
    """Name for messages."""
    data: bytes
    path: str = ""
    """Absolute path; "" for standard input."""


def read_pictures(names: Iterable[str]) -> list[PictureFile]:
    """Return the picture files of these names; "-" is standard input. Raises `ImageError` that names the file."""
    return [read_picture_file(name) for name in names]


def read_picture_file(name: str | Path) -> PictureFile:
    """Return a picture file; "-" is standard input. Only its header is decoded. Raises `ImageError` that names the file."""
    from ...vision.picture import picture_size, read_file

    if name == STDIN:
        shown, data, path = "standard input", sys.stdin.buffer.read(), ""
    elif isinstance(name, str) and re.match("(?:https?|ftp)://", name, re.IGNORECASE):
        raise ImageError(f"{one_line(name, 60)} is a URL: download the picture, and name the file")
    else:
        shown, data = Path(name).name, read_file(Path(os.path.expanduser(name)))
        path = os.path.abspath(os.path.expanduser(name))
    try:
        picture_size(data)
    except ImageError as error:
        raise ImageError(f"{shown}: {error}") from None
    return PictureFile(shown, data, path)


def picture_note(llm: LLM | RemoteModel, picture: PictureFile) -> str:
    """Return the size of a picture and, of a model that is loaded here, its tokens. Raises `ImageError` that names the file."""
    if isinstance(llm, RemoteModel):
        from ...vision.picture import picture_size

        height, width = picture_size(picture.data)
        return f"{picture.name}: {width} x {height} pixels"
    try:
        layout = llm.image_layout(picture.data)
    except ImageError as error:
        raise ImageError(f"{picture.name}: {str(error).removeprefix('image: ')}") from None
    (height, width), (new_height, new_width) = layout.size, layout.resized
    scaled = f", scaled down to {new_width} x {new_height}" if layout.scaled_down else ""
    return f"{picture.name}: {width} x {height} pixels{scaled}, {layout.tokens} tokens"


def with_names(message: str, pictures: Sequence[PictureFile]) -> str:
    """Return an error message about `images[0]` with the name of the file instead."""
    place = re.match(r"images\[(\d+)\]: ", message)
    return f"{pictures[int(place[1])].name}: {message[place.end() :]}" if place else message
