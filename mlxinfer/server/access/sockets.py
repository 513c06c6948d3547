"""Listening sockets, opened with safe modes or passed by launchd or systemd, and the users who may connect to them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ...errors import ServerError
from ..settings import ServerSettings

LAUNCHD_NAME = "Listeners"
"""Name of the sockets in the launchd property list."""
_MAX_PATH_BYTES = 103
"""`sun_path` has 104 bytes on macOS, including a final zero, and 108 on Linux. The smaller limit makes settings portable."""
BACKLOG = 512
"""Connections that may wait to be accepted."""
_SYSTEMD_FIRST = 3
"""Descriptor of the first socket that systemd passes."""
_SOL_LOCAL, _LOCAL_PEERCRED, _LOCAL_PEERPID, _XUCRED_VERSION = 0, 1, 2, 0
"""<sys/un.h> and <sys/ucred.h> of macOS."""
_XUCRED = struct.Struct("=IIhxx16I")
"""macOS' `struct xucred`: version, uid, number of groups, groups."""
_UCRED = struct.Struct("=iII")
"""Linux' `struct ucred` of <sys/socket.h>: pid, uid, gid."""


class Listeners(list[socket.socket]):
    """Listening sockets."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__()
        self.leave = leave
        """Close the sockets, remove the file of a Unix socket, and release its lock. A successor can start while this server still sends
        answers. Repeated calls have no effect."""


@contextmanager
def listening(settings: ServerSettings) -> Iterator[Listeners]:
    """Listening sockets. At the end they are closed and the file of a Unix socket is removed. Raises `ServerError`."""
    with ExitStack() as stack:
        sockets = Listeners(stack.close)
        sockets += passed_sockets() if settings.activated else []
        for each in sockets:
            stack.callback(each.close)
            if each.family != socket.AF_UNIX:
                settings.check_address(each.getsockname()[0])
        if settings.socket is not None:
            sockets.append(stack.enter_context(unix_socket(settings.socket)))
        if settings.host is not None:
            sockets.append(tcp_socket(settings.host, settings.port))
            stack.callback(sockets[-1].close)
        yield sockets


@contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """A listening socket with mode 0600 in a directory with mode 0700. The directory is created if it does not exist.

    The socket of a dead server is replaced. Raises `ServerError` if another server listens there.
    """
    path = checked_path(path)
    private_directory(path.parent)
    with _locked(path):
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            try:
                listener.bind(str(path))
            except OSError as error:
                raise ServerError(f"cannot make the socket {path}: {error.strerror}") from None
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
            yield listener
        finally:
            listener.close()
            with suppress(FileNotFoundError):
                path.unlink()


def checked_path(path: Path) -> Path:
    """The absolute path of a Unix socket. Raises `ServerError` if the path is too long for macOS."""
    path = path.absolute()
    size = len(os.fsencode(path))
    if size > _MAX_PATH_BYTES:
        raise ServerError(
            f"the path of a socket can have {_MAX_PATH_BYTES} bytes, and this one has {size}: give a shorter one with --socket or "
            f"MLXINFER_SOCKET ({path})"
        )
    return path


def private_directory(directory: Path) -> None:
    """Create a directory that only this user can enter, if it does not exist. Raises `ServerError` if others may enter it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ServerError(f"cannot make the directory {directory} for the socket: {error.strerror}") from None
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        # A directory of another user, of the system, or with the sticky bit (like /tmp) is shared.
        shared = found.st_uid != os.geteuid() or found.st_uid == 0 or found.st_mode & stat.S_ISVTX
        where = "below it" if shared else "elsewhere, or chmod 700 this one"
        raise ServerError(f"{directory} is open to others: put the socket in a folder of your own {where} (it is created)")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock while the socket is in use. The lock file stays: removing it would race with a server that starts at the same time."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(path.with_name(path.name + ".lock"), flags, 0o600)
    except OSError as error:
        raise ServerError(f"cannot lock the socket {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path) from None
        yield
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ServerError(f"{path} exists and is not a socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise ServerError(f"cannot tell whether a server listens at {path}: {error.strerror or error}") from None
        else:
            raise _in_use(path)


def _in_use(path: Path) -> ServerError:
    return ServerError(f"another server listens at {path}: stop it, or choose another --socket")


def tcp_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ServerError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        what = "another program listens there" if taken else str(getattr(error, "strerror", None) or error)
        raise ServerError(f"cannot listen on {host}:{port}: {what}") from None
    return listener


def passed_sockets() -> list[socket.socket]:
    """Listening sockets from launchd or systemd, whichever started this process. Raises `ServerError` if none were passed."""
    descriptors = _from_launchd() if sys.platform == "darwin" else _from_systemd()
    if not descriptors:
        raise ServerError("no sockets were handed over: --activated is for services that launchd or systemd starts")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _from_systemd() -> list[int]:
    """The protocol of `sd_listen_fds(3)`: descriptors from 3 on, if they were passed to this process."""
    count, process = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    if process != str(os.getpid()) or not (count.isascii() and count.isdigit()):
        return []
    return list(range(_SYSTEMD_FIRST, _SYSTEMD_FIRST + int(count)))


def _from_launchd() -> list[int]:
    """`launch_activate_socket` of <launch.h>."""
    library = ctypes.CDLL(None)
    descriptors = ctypes.POINTER(ctypes.c_int)()
    count = ctypes.c_size_t()
    status = library.launch_activate_socket(LAUNCHD_NAME.encode(), ctypes.byref(descriptors), ctypes.byref(count))
    if status != 0:
        return []
    found = [descriptors[i] for i in range(count.value)]
    library.free.argtypes = [ctypes.c_void_p]
    library.free(descriptors)
    return found


def address(listener: socket.socket) -> str:
    """The address of a listener: `unix:/path` or `http://host:port`."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


def peer_uid(connection: socket.socket) -> int | None:
    """The user id at the other end of a Unix socket; None if the system does not report it. Raises `OSError`."""
    if sys.platform == "darwin":
        raw = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
        version, uid = _XUCRED.unpack(raw.ljust(_XUCRED.size, b"\0"))[:2]
        return uid if version == _XUCRED_VERSION and len(raw) >= 8 else None
    if sys.platform == "linux":
        return int(_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])
    return None


def peer_pid(connection: socket.socket) -> int | None:
    """The process at the other end of a Unix socket; None if the system does not report it. Raises `OSError`."""
    if sys.platform == "darwin":
        return int(struct.unpack("=i", connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, 4))[0])
    if sys.platform == "linux":
        return int(_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0])
    return None


def is_allowed(uid: int | None) -> bool:
    """True if this user may connect: the server's own user and root."""
    return uid is not None and uid in (os.geteuid(), 0)
