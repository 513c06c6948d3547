"""Opens regular files only: a pipe would block a reader forever, and a device has no end. Stamps reveal a changed file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 512 << 20
"""Maximum bytes of a file that is read whole; the largest tokenizers have 40 MB."""


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading bytes. Raises OSError, also for anything but a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, os.strerror(number) if number == errno.EISDIR else "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file. Raises OSError, also for anything but a regular file and above `most` bytes."""
    with open_plain(path) as file:
        contents = file.read(most + 1)
    if len(contents) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB", str(path))
    return contents


def file_stamp(path: Path) -> list[str | int]:
    """Real path, size, and times of the last change of content and metadata.

    The stamp differs after any write, even if the old time was restored. Raises OSError.
    """
    found = path.stat()
    return [os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns]
