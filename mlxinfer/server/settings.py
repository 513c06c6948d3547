"""A server's settings: where it listens, which requests it lets in, and its limits."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from ..errors import ServerError
from .access.origins import checked_origin
from .log import LogFormat

DEFAULT_PORT = 8080
LOOPBACK = "127.0.0.1"
"""The address for TCP if only a port is given."""

ReasoningField = Literal["both", "reasoning", "reasoning_content", "none"]
"""Where chat completions put what a model thought: clients know one name or the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may use. A request beyond one of these is refused."""

    body_bytes: int = 16 * 2**20
    """Bytes of a request's body."""
    header_bytes: int = 32 * 2**10
    """Bytes of a request's path and headers."""
    header_s: float = 15.0
    """Seconds until a request's headers are complete, from connecting or from the end of the previous response on the same connection."""
    body_s: float = 30.0
    """Seconds until a request's body is complete."""
    request_s: float | None = None
    """Seconds for an answer, including the time in the queue; None is no limit."""
    connections: int = 1024
    """Open connections on the Unix socket, and as many on TCP."""
    prompts: int = 256
    """Prompts of one request times the answers to each."""
    keep_alive_s: float = 10.0
    """Seconds of silence after which a stream sends a keep-alive."""
    patience_s: float = 0.25
    """Seconds that a stream's status waits for the first token, so that an early error still has a status of its own."""
    write_s: float = 60.0
    """Seconds without reading after which a client counts as gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens and which requests it lets in. Raises `ServerError` for settings that contradict each other or are unsafe."""

    socket: Path | None = None
    """Path of the Unix socket; None is no Unix socket."""
    host: str | None = None
    """Address for TCP; None is no TCP. Anything but loopback needs an `api_key`."""
    port: int = DEFAULT_PORT
    """TCP port; 0 lets the system choose."""
    activated: bool = False
    """Whether launchd or systemd passes the listening sockets."""
    api_key: str | None = None
    """The key that requests on TCP must have; None asks for none. Unix sockets need no key: the system tells which user connects."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that clients may use for this machine, besides those of loopback and `host`."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages and browser-based apps that may use the server on TCP, as `https://app.example`; one that ends in `://*` is a
    whole scheme, other than http and https."""
    log_format: LogFormat = "auto"
    """Format of the log: lines for people, or JSON."""
    opens_page: bool = False
    """Whether the page is opened in the user's browser as soon as the server listens."""
    reasoning_field: ReasoningField = "both"
    """The fields of chat completions with what the model thought; "none" leaves it out."""
    drain_s: float = 0.0
    """Seconds after the first signal in which everything is still answered, but `/health` says 503, so that routers turn away."""
    kv_events: str | None = None
    """ZMQ endpoint that tells routers what the prefix caches hold (docs/routers.md); None tells nobody."""
    kv_events_replay: str | None = None
    """ZMQ endpoint at which they ask for what they missed."""
    adapters_dir: Path | None = None
    """Folder from which clients may load adapters while the server runs; None allows it to nobody."""
    limits: Limits = field(default_factory=Limits)
    """Sizes, times and counts."""

    def __post_init__(self) -> None:
        if self.host is not None:
            self.check_address(self.host)
        object.__setattr__(self, "allowed_origins", tuple(map(checked_origin, self.allowed_origins)))
        if self.socket is None and self.host is None and not self.activated:
            raise ServerError("nowhere to listen: give --socket PATH or --port PORT")
        if self.adapters_dir is not None and not self.adapters_dir.expanduser().is_dir():
            raise ServerError(f"--allow-adapter-loading {self.adapters_dir}: there is no such folder")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and len(self.api_key) >= 8):
            raise ServerError("the API key must have at least 8 characters, all of them printable ASCII")

    def check_address(self, host: str) -> None:
        """Raises `ServerError` where other machines could request and no key is asked for."""
        if not self.api_key and not is_loopback(host):
            raise ServerError(
                f"{host} is for other machines too, which needs a key: set MLXINFER_API_KEY or --api-key-file, or use {LOOPBACK}"
            )


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address or `localhost`; any other name might resolve to anything."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def default_socket() -> Path:
    """`$MLXINFER_SOCKET`, else `~/.mlxinfer/api.sock`."""
    return Path(os.environ.get("MLXINFER_SOCKET") or "~/.mlxinfer/api.sock").expanduser()


def is_open(file: Path | None) -> bool:
    """Whether others than its owner may read or write the file of the API key, so that the key is none."""
    try:
        return file is not None and stat.S_ISREG(mode := file.expanduser().stat().st_mode) and bool(mode & 0o077)
    except OSError:
        return False  # reading it says why


def read_api_key(file: Path | None) -> str | None:
    """The API key in this file, else in `$MLXINFER_API_KEY`; None if there is neither. Raises `ServerError`."""
    if file is None:
        return os.environ.get("MLXINFER_API_KEY") or None
    try:
        return file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"cannot read the API key from {file}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
