"""A property list with which launchd holds the socket, and starts the server when somebody connects."""

from __future__ import annotations

import plistlib
import sys
from collections.abc import Sequence
from typing import Any

from .settings import LOOPBACK, ServerSettings, default_socket
from .sockets import LAUNCHD_NAME

LABEL = "mlxinfer.serve"


def property_list(arguments: Sequence[str], settings: ServerSettings) -> str:
    """For `~/Library/LaunchAgents`. `arguments`: the models and their options. The key is not written into it."""
    path = (settings.socket or default_socket()).absolute()
    sockets: list[dict[str, Any]] = [{"SockPathName": str(path), "SockPathMode": 0o600}]
    if settings.host is not None:
        sockets.append({"SockNodeName": settings.host or LOOPBACK, "SockServiceName": str(settings.port), "SockType": "stream"})
    hosts = [part for host in settings.allowed_hosts for part in ("--allowed-host", host)]
    limits = [] if settings.limits.request_s is None else ["--request-timeout", f"{settings.limits.request_s:g}"]
    value = {
        "Label": LABEL,
        "ProgramArguments": [sys.executable, "-m", "mlxinfer", "serve", *arguments, "--activated", *hosts, *limits],
        "Sockets": {LAUNCHD_NAME: sockets},
        "ProcessType": "Interactive",
        "StandardErrorPath": str(path.with_name("serve.log")),
        "Umask": 0o077,
    }
    return plistlib.dumps(value, sort_keys=False).decode()
