"""The names and addresses by which other machines reach this one."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from ..settings import ServerSettings, is_loopback

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation (RFC 5737, RFC 3849): the system says which of its own it would send from, and nothing is sent."""
WILDCARDS = ("0.0.0.0", "::")


def own_names(settings: ServerSettings) -> tuple[str, ...]:
    """The host's name, and that of mDNS, where the settings let other machines in: that takes a key."""
    if not settings.api_key or (settings.host is not None and is_loopback(settings.host)):
        return ()
    name = socket.gethostname().lower().rstrip(".")
    first = name.partition(".")[0]
    return tuple(dict.fromkeys((name, first, f"{first}.local"))) if first else ()


def addresses_for_others(listeners: Iterable[socket.socket], settings: ServerSettings) -> list[str]:
    """Address to type into the browser of another machine on the same network; empty where a listener names its address itself."""
    found = []
    for listener in listeners:
        if listener.family in _ELSEWHERE and listener.getsockname()[0] in WILDCARDS:
            port, own = listener.getsockname()[1], _own_address(listener.family)
            hosts = [own, *(name for name in own_names(settings) if name.endswith(".local"))]
            found += [f"http://{host}:{port}" for host in hosts if host]
    return found


def _own_address(family: int) -> str:
    """The address of this machine in its network; empty without a network."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[socket.AddressFamily(family)], 9))
            host = str(probe.getsockname()[0])
        except OSError:
            return ""
    return "" if is_loopback(host) else f"[{host}]" if ":" in host else host
