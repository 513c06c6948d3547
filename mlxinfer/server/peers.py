"""Who is at the other end of a Unix socket, as the kernel says."""

from __future__ import annotations

import os
import socket
import struct
import sys

_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_VERSION = 0, 1, 0
_XUCRED = struct.Struct("=IIhxx16I")
"""version, uid, number of groups, groups: `struct xucred` of <sys/ucred.h>."""
_UCRED = struct.Struct("=iII")
"""pid, uid, gid: `struct ucred` of <sys/socket.h>."""


def peer_uid(connection: socket.socket) -> int | None:
    """The user who connected; None where the system does not say. Raises `OSError`."""
    if sys.platform == "darwin":
        raw = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
        version, uid = _XUCRED.unpack(raw.ljust(_XUCRED.size, b"\0"))[:2]
        return uid if version == _XUCRED_VERSION and len(raw) >= 8 else None
    if sys.platform == "linux":
        return int(_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])
    return None


def welcome(uid: int | None) -> bool:
    """The user whose server this is, and root, who may do anything anyway."""
    return uid is not None and uid in (os.geteuid(), 0)
