"""Settings of a server: addresses, accepted requests, and limits."""

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
"""Default address for TCP."""

ReasoningField = Literal["both", "reasoning", "reasoning_content", "none"]
"""Fields of chat completions with the reasoning of the model. Clients read one name or the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for clients. A request beyond a limit is refused."""

    body_bytes: int = 16 * 2**20
    """Bytes of a request's body."""
    image_body_bytes: int = 64 * 2**20
    """Bytes of the body of a request to a model that sees images."""
    picture_requests: int = 2
    """Requests whose images are decoded at the same time."""
    picture_queue: int = 32
    """Requests with images that may wait for their turn; further ones are refused."""
    header_bytes: int = 32 * 2**10
    """Bytes of a request's path and headers."""
    header_s: float = 15.0
    """Seconds until a request's headers are complete, counted from the connection or from the end of the previous response."""
    body_s: float = 30.0
    """Seconds until a request's body is complete."""
    request_s: float | None = None
    """Seconds for an answer, including the time in the queue; None means no limit."""
    connections: int = 1024
    """Open connections on the Unix socket, and the same number on TCP."""
    prompts: int = 256
    """Prompts of one request times answers to each."""
    keep_alive_s: float = 10.0
    """Seconds without output after which a stream sends a keep-alive."""
    patience_s: float = 0.25
    """Seconds that a stream waits for its first token before it sends the status. An early error keeps its own status."""
    write_s: float = 60.0
    """Seconds without reading after which a client counts as disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Addresses of a server and the requests it accepts. Raises `ServerError` for settings that contradict each other or are unsafe."""

    socket: Path | None = None
    """Path of the Unix socket; None means no Unix socket."""
    host: str | None = None
    """Address for TCP; None means no TCP. Any address but loopback needs an `api_key`."""
    port: int = DEFAULT_PORT
    """TCP port; 0 selects a free port."""
    activated: bool = False
    """True if launchd or systemd passes the listening sockets."""
    api_key: str | None = None
    """Key that requests on TCP must have; None means no key. Unix sockets need no key, because the system reports the user who connects."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that clients may use for this machine, besides those of loopback and `host`."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages and browser-based apps that may use the server on TCP, such as `https://app.example`. An origin that ends in
    `://*` covers a whole scheme, except http and https."""
    log_format: LogFormat = "auto"
    """Format of the log: text lines or JSON."""
    opens_page: bool = False
    """True to open the page in the user's browser as soon as the server listens."""
    reasoning_field: ReasoningField = "both"
    """Fields of chat completions with the reasoning of the model; "none" leaves it out."""
    drain_s: float = 0.0
    """Seconds after the first signal in which all requests are still answered, but `/health` returns 503, so that routers choose another
    server."""
    kv_events: str | None = None
    """ZMQ endpoint that publishes the contents of the prefix caches for routers (docs/routers.md); None publishes nothing."""
    kv_events_replay: str | None = None
    """ZMQ endpoint at which routers request missed events."""
    adapters_dir: Path | None = None
    """Folder from which clients may load adapters while the server runs; None forbids it."""
    limits: Limits = field(default_factory=Limits)
    """Limits for clients."""

    def __post_init__(self) -> None:
        if self.host is not None:
            self.check_address(self.host)
        object.__setattr__(self, "allowed_origins", tuple(map(checked_origin, self.allowed_origins)))
        if self.socket is None and self.host is None and not self.activated:
            raise ServerError("nowhere to listen: give --socket PATH or --port PORT")
        if self.adapters_dir is not None and not self.adapters_dir.expanduser().is_dir():
            raise ServerError(f"--allow-adapter-loading {self.adapters_dir}: no such folder")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and len(self.api_key) >= 8):
            raise ServerError("the API key must have at least 8 characters, all of them printable ASCII")

    def check_address(self, host: str) -> None:
        """Raise `ServerError` if other machines could send requests without a key."""
        if not self.api_key and not is_loopback(host):
            raise ServerError(
                f"{host} accepts other machines, which needs a key: set MLXINFER_API_KEY or --api-key-file, or use {LOOPBACK}"
            )


def is_loopback(host: str) -> bool:
    """True for a loopback address or `localhost`. Any other name might resolve to any address."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_open(file: Path | None) -> bool:
    """True if other users may read or write the file of the API key: then the key is not secret."""
    try:
        return file is not None and stat.S_ISREG(mode := file.expanduser().stat().st_mode) and bool(mode & 0o077)
    except OSError:
        return False  # `read_api_key` reports the reason


def read_api_key(file: Path | None) -> str | None:
    """The API key in this file, or else in `$MLXINFER_API_KEY`; None if neither exists. Raises `ServerError`."""
    if file is None:
        return os.environ.get("MLXINFER_API_KEY") or None
    try:
        return file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"cannot read the API key from {file}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
