"""Files named in messages, and the clipboard."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ...errors import PromptError
from ..common.console import dumb_terminal, human_bytes, text_of_file
from ..common.pictures import is_picture

_NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_CLIPBOARDS = (("pbcopy",), ("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input"))


def with_files(message: str) -> tuple[str, list[str]]:
    """Return the message with the contents of files named as `@path` (in double quotes for spaces) below it, and a note per file.

    A `@path` without a file, or of a picture, stays text. Raises `PromptError` for a file that is unreadable, too large or not text.
    """
    told, blocks = [], []
    for path in _named_files(message):
        if is_picture(path):
            continue
        block, note = file_block(path)
        blocks.append(block)
        told.append(note)
    return "\n\n".join([message, *blocks]), told


def file_block(path: Path) -> tuple[str, str]:
    """Return a file's text as a named code block, and a note with its size. Raises `PromptError`."""
    text = text_of_file(path)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}", f"{path} ({human_bytes(len(text.encode()))})"


def named_pictures(message: str) -> list[Path]:
    """Return the picture files named as `@path`, in order."""
    return [path for path in _named_files(message) if is_picture(path)]


def _named_files(message: str) -> list[Path]:
    found = (_file(quoted or word) for quoted, word in _NAMED.findall(message))
    return [path for path in found if path is not None]


def _file(name: str) -> Path | None:
    """Return the named file, without punctuation at the end of a sentence; None if it does not exist."""
    for text in (name, name.rstrip(".,;:!?)")):
        path = Path(os.path.expanduser(text))
        try:
            if text and path.is_file():
                return path
        except (OSError, ValueError):
            return None
    return None


def copy_to_clipboard(text: str) -> None:
    """Copy text by the system's program or, without one, by the terminal (OSC 52), which also works over ssh.

    Raises `PromptError` without either.
    """
    for command in _CLIPBOARDS:
        if shutil.which(command[0]) and (command[0] == "pbcopy" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            done = subprocess.run(command, input=text.encode(), check=False, capture_output=True, timeout=10)
            if done.returncode == 0:
                return
    if not sys.stdout.isatty() or dumb_terminal():
        raise PromptError("No clipboard was found.")
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
    sys.stdout.flush()
