"""The launchd service that owns the sockets and starts the server."""

from __future__ import annotations

import plistlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...util.cache_dir import default_socket
from ..settings import LOOPBACK, ServerSettings
from .open_files import MOST_FILES
from .sockets import LAUNCHD_NAME, checked_path, private_directory

LABEL = "mlxinfer.serve"


def property_list(arguments: Sequence[str], settings: ServerSettings) -> str:
    """A property list for `~/Library/LaunchAgents`. `arguments` are the models and their options. The API key is not written. Raises
    `ServerError` if the socket's path is too long."""
    path = _socket(settings)
    sockets: list[dict[str, Any]] = [{"SockPathName": str(path), "SockPathMode": 0o600}]
    if settings.host is not None:
        sockets.append({"SockNodeName": settings.host or LOOPBACK, "SockServiceName": str(settings.port), "SockType": "stream"})
    hosts = [part for host in settings.allowed_hosts for part in ("--allowed-host", host)]
    hosts += [part for origin in settings.allowed_origins for part in ("--allowed-origin", origin)]
    folder = [] if settings.adapters_dir is None else ["--allow-adapter-loading", str(settings.adapters_dir.expanduser().absolute())]
    limits = [] if settings.limits.request_s is None else ["--request-timeout", f"{settings.limits.request_s:g}"]
    reasoning = [] if settings.reasoning_field == "both" else ["--reasoning-field", settings.reasoning_field]
    value = {
        "Label": LABEL,
        "ProgramArguments": [sys.executable, "-m", "mlxinfer", "serve", *arguments, "--activated", *hosts, *folder, *limits, *reasoning],
        "Sockets": {LAUNCHD_NAME: sockets},
        "ProcessType": "Interactive",
        "StandardErrorPath": str(path.with_name("serve.log")),
        "SoftResourceLimits": {"NumberOfFiles": MOST_FILES},
        "Umask": 0o077,
    }
    return plistlib.dumps(value, sort_keys=False).decode()


def make_directory(settings: ServerSettings) -> Path:
    """Create the directory of the socket and the log: launchd creates files, but no directories. Raises `ServerError`."""
    directory = _socket(settings).parent
    private_directory(directory)
    return directory


def _socket(settings: ServerSettings) -> Path:
    return checked_path(settings.socket or default_socket())
