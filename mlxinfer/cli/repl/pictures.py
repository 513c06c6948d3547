"""Pictures in the messages of a chat: found in what the user typed or dropped, kept as paths, and read again for each answer.

A turn keeps the path and the SHA-256 of each picture under "images", not the picture itself. The files are read when they are attached, and
when a conversation is continued later. A file that is gone or has changed by then is named to the user, and the model reads a note in its
place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ...errors import ImageError
from ..common.pictures import is_picture, read_picture_file

_WORD = re.compile(r"""[ \t\n]*(?:'([^'\n]+)'|"([^"\n]+)"|((?:\\.|[^ \t\n\\'"])+))(?=[ \t\n]|$)""")
"""One argument of a shell: quoted, or with escaped characters. The narrow space in the names of macOS' screenshots ends no argument."""


class Pictures:
    """The pictures of a conversation, by their digests."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def attach(self, path: Path) -> dict[str, str]:
        """Read a picture, and return its entry for a turn. Raises `ImageError` that names the file."""
        found = read_picture_file(path)
        digest = sha256(found.data).hexdigest()
        self._data[digest] = found.data
        return {"path": str(path.absolute()), "sha256": digest}

    def data(self, entry: Mapping[str, str]) -> bytes | None:
        """Return the bytes of an attached picture; None if its file is gone or has changed."""
        return self._data.get(entry["sha256"])

    def read_again(self, turns: Sequence[Mapping[str, Any]]) -> list[str]:
        """Read the pictures of a saved conversation, and return a note for each that is gone or has changed."""
        lost = {}
        for entry in (entry for turn in turns for entry in turn.get("images", ()) if entry["sha256"] not in self._data):
            path = Path(entry["path"])
            try:
                if self.attach(path)["sha256"] != entry["sha256"]:
                    lost[entry["sha256"]] = f"{path} has changed: the model no longer sees it"
            except ImageError as error:
                lost[entry["sha256"]] = f"{error}: the model no longer sees it"
        return list(lost.values())

    def message(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return a turn as a message for the model: the pictures first, then the text."""
        message = {name: value for name, value in turn.items() if name != "images"}
        if turn.get("images"):
            message["content"] = [*map(self._part, turn["images"]), {"type": "text", "text": turn["content"]}]
        return message

    def _part(self, entry: Mapping[str, str]) -> dict[str, Any]:
        data = self.data(entry)
        if data is None:
            return {"type": "text", "text": f"[the picture {name_of(entry)} is no longer available]\n"}
        return {"type": "image", "image": data}


def name_of(entry: Mapping[str, str]) -> str:
    """Return the file name of a picture in a turn."""
    return Path(entry["path"]).name


def first_path(text: str) -> tuple[Path, str] | None:
    """Return the path at the start of a text and the rest; None without one. It may be quoted, escaped, or a `file://` URL."""
    found = _WORD.match(text)
    if found is None:
        return None
    return _path(found[1] or found[2] or re.sub(r"\\(.)", r"\1", found[3])), text[found.end() :]


def _path(name: str) -> Path:
    return Path(unquote(urlsplit(name).path)) if name[:7].lower() == "file://" else Path(os.path.expanduser(name))


def dropped(message: str) -> tuple[list[Path], str]:
    """Return the pictures whose absolute paths start a message or fill a line of it, and the rest of the message.

    A terminal writes these paths when a file is dragged into it. Paths within sentences stay text.
    """
    found, lines = [], []
    for number, line in enumerate(message.split("\n")):
        paths, rest = _pictures_at_start(line)
        if number and rest.strip():
            paths, rest = [], line
        found += paths
        if not paths or rest.strip():
            lines.append(rest.lstrip() if paths else line)
    return found, "\n".join(lines)


def _pictures_at_start(line: str) -> tuple[list[Path], str]:
    whole = _path(line.strip())
    if _is_dropped(whole):  # also with spaces, as a file manager copies it
        return [whole], ""
    paths, rest = [], line
    while (found := first_path(rest)) is not None and _is_dropped(found[0]):
        paths.append(found[0])
        rest = found[1]
    return paths, rest


def _is_dropped(path: Path) -> bool:
    try:
        return path.is_absolute() and is_picture(path) and path.is_file()
    except (OSError, ValueError):
        return False
