"""Opening the page in the user's browser."""

from __future__ import annotations

import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence

from ..access.sockets import address
from ..log import notice


def open_page(listeners: Sequence[socket.socket], open_url: Callable[[str], bool] | None = None) -> threading.Thread:
    """Opens the page of the server that listens here, with `open_url` or in the user's browser, in a thread, since a browser may keep its
    caller waiting. Where that cannot be done, the log says which address to open."""
    url = page_url(listeners)
    thread = threading.Thread(target=_open, args=(url, open_url or webbrowser.open), name="open-page", daemon=True)
    thread.start()
    return thread


def _open(url: str | None, open_url: Callable[[str], bool]) -> None:
    if url is None:
        notice("--open needs a TCP port: browsers cannot open a Unix socket")
        return
    try:
        opened = open_url(url)
    except (OSError, webbrowser.Error):
        opened = False
    if not opened:
        notice(f"no browser could be opened: the page is at {url}")


def page_url(listeners: Sequence[socket.socket]) -> str | None:
    """The page's address on this machine; None without TCP."""
    for listener in listeners:
        if listener.family != socket.AF_UNIX:
            host = "[::1]" if listener.family == socket.AF_INET6 else "127.0.0.1"
            everywhere = listener.getsockname()[0] in ("0.0.0.0", "::")
            return f"http://{host}:{listener.getsockname()[1]}/" if everywhere else f"{address(listener)}/"
    return None
