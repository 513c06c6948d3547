"""How many files the process may have open: every connection is one."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import replace

from ..log import notice
from ..settings import ServerSettings

MOST_FILES = 4096
"""Files that a server asks for; shells and launchd of a Mac allow 256."""
_OTHER_FILES = 64
"""Files that are no connections: models, libraries, the cache on disk, and what the event loop needs."""


def with_files(settings: ServerSettings) -> ServerSettings:
    """Raise the process's limit of open files as far as it may be, and lower that of connections where it is not enough for them."""
    allowed = _raise_limit()
    kinds = 2 if settings.activated else (settings.socket is not None) + (settings.host is not None)
    most = max((allowed - _OTHER_FILES) // max(kinds, 1), 1)
    if settings.limits.connections <= most:
        return settings
    each = " on each kind of socket" if kinds > 1 else ""
    notice(f"the system allows {allowed} open files, so {most} connections at a time{each}: raise its hard limit (ulimit -Hn) for more")
    return replace(settings, limits=replace(settings.limits, connections=most))


def _raise_limit() -> int:
    """The soft limit, which is the wanted one unless the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
