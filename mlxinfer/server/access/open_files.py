"""The process's limit of open files, which also limits connections: each connection is a file."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import replace

from ..log import notice
from ..settings import ServerSettings

MOST_FILES = 4096
"""Files that a server asks for. Shells and launchd allow 256 on a Mac."""
_OTHER_FILES = 64
"""Files other than connections: models, libraries, the prefix cache on disk, and the event loop's files."""


def with_files(settings: ServerSettings) -> ServerSettings:
    """Raise the process's limit of open files as far as the system allows. If the limit is still too low, return settings with fewer
    connections."""
    allowed = _raise_limit()
    kinds = 2 if settings.activated else (settings.socket is not None) + (settings.host is not None)
    most = max((allowed - _OTHER_FILES) // max(kinds, 1), 1)
    if settings.limits.connections <= most:
        return settings
    each = " on each kind of socket" if kinds > 1 else ""
    enough = f"the system allows {allowed} open files, which is enough for {most} connections at a time{each}"
    notice(f"{enough}: raise its hard limit (ulimit -Hn) for more")
    return replace(settings, limits=replace(settings.limits, connections=most))


def _raise_limit() -> int:
    """Raise and return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
