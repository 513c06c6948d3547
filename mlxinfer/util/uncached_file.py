"""Files that are read past the system's cache, in whole pages."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

PAGE = 16384
"""Bytes that such reads are aligned to: a page of Apple silicon, and a multiple of all others."""
_F_NOCACHE = 48
"""macOS: reads leave no pages in the system's cache."""


def whole_pages(nbytes: int) -> int:
    """Round up to a multiple of `PAGE`."""
    return -(-nbytes // PAGE) * PAGE


def bypass_cache(descriptor: int) -> bool:
    """Ask the system to cache nothing of an open file. True if the disk then writes straight into memory, which must be aligned."""
    if sys.platform != "darwin":
        return set_direct(descriptor, True)
    import fcntl

    with suppress(OSError):
        fcntl.fcntl(descriptor, _F_NOCACHE, 1)
    return False


def set_direct(descriptor: int, wanted: bool) -> bool:
    """Set or clear O_DIRECT of an open file. False if the system or the file system does not support it."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    import fcntl

    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:
        return False
    return True


def drop_pages(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
    """Drop bytes of a file from the system's cache where that is possible; 0 bytes are the rest of the file.

    Bytes that are not on the disk yet stay.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
