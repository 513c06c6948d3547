"""Names and addresses at which other machines reach this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from ..settings import ServerSettings, is_loopback

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation (RFC 5737, RFC 3849). Connecting a UDP socket to one selects this machine's source address; nothing
is sent."""
WILDCARDS = ("0.0.0.0", "::")


def own_names(settings: ServerSettings) -> tuple[str, ...]:
    """The host name and the mDNS name, if the settings accept other machines. Accepting other machines requires a key."""
    if not settings.api_key or (settings.host is not None and is_loopback(settings.host)):
        return ()
    name = socket.gethostname().lower().rstrip(".")
    first = name.partition(".")[0]
    return tuple(dict.fromkeys((name, first, f"{first}.local"))) if first else ()


def addresses_for_others(listeners: Iterable[socket.socket], settings: ServerSettings) -> list[str]:
    """Addresses for the browser of another machine on the same network. Empty unless a listener is bound to all addresses."""
    found = []
    for listener in listeners:
        if listener.family in _ELSEWHERE and listener.getsockname()[0] in WILDCARDS:
            port, own = listener.getsockname()[1], _own_address(listener.family)
            hosts = [own, *(name for name in own_names(settings) if name.endswith(".local"))]
            found += [f"http://{host}:{port}" for host in hosts if host]
    return found


def _own_address(family: int) -> str:
    """This machine's address in its network; empty without a network."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[socket.AddressFamily(family)], 9))
            host = str(probe.getsockname()[0])
        except OSError:
            return ""
    return "" if is_loopback(host) else f"[{host}]" if ":" in host else host
