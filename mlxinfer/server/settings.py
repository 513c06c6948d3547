"""What a server is told: where to listen, whom to let in, how much to take."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from ..errors import ServerError

DEFAULT_PORT = 8080
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes, seconds and counts. A request beyond one of them is refused."""

    body_bytes: int = 16 * 2**20
    header_bytes: int = 32 * 2**10
    header_s: float = 15.0
    """From connecting, or from the end of the last answer on the same connection, to the end of the next request's headers."""
    body_s: float = 30.0
    request_s: float | None = None
    """For an answer, the time that it waits included."""
    connections: int = 1024
    prompts: int = 256
    """Prompts of one request, and answers to them."""
    keep_alive_s: float = 10.0
    """A silent stream sends a comment this often."""
    patience_s: float = 0.25
    """A stream's status waits so long for the first token, so that an early error still has a status of its own."""
    write_s: float = 60.0
    """A client that reads nothing for so long is taken for gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """`socket=None` is no Unix socket, `host=None` is no TCP. `port=0` lets the system choose. `activated`: launchd or systemd hands the
    sockets over. `api_key` is asked for on TCP, never on a Unix socket, where the system tells who is there. `allowed_hosts`: names by
    which clients may context this machine, beyond those of loopback and `host`. Raises `ServerError`."""

    socket: Path | None = None
    host: str | None = None
    port: int = DEFAULT_PORT
    activated: bool = False
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.host is not None:
            self.check_address(self.host)
        if self.socket is None and self.host is None and not self.activated:
            raise ServerError("nowhere to listen: give --socket PATH or --port PORT")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and len(self.api_key) >= 8):
            raise ServerError("the API key must have at least 8 characters, all of them printable ASCII")

    def check_address(self, host: str) -> None:
        """Raises `ServerError` where other machines could request and no key is asked for."""
        if not self.api_key and not is_loopback(host):
            raise ServerError(
                f"{host} is for other machines too, which needs a key: set MLXINFER_API_KEY or --api-key-file, or use {LOOPBACK}"
            )


def is_loopback(host: str) -> bool:
    """Of names only `localhost`: any other might resolve to anything."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def default_socket() -> Path:
    """`$MLXINFER_SOCKET`, else `~/.mlxinfer/api.sock`."""
    return Path(os.environ.get("MLXINFER_SOCKET") or "~/.mlxinfer/api.sock").expanduser()


def read_api_key(file: Path | None) -> str | None:
    """From the file, else from `$MLXINFER_API_KEY`. Raises `ServerError`."""
    if file is None:
        return os.environ.get("MLXINFER_API_KEY") or None
    try:
        return file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"cannot read the API key from {file}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
