"""Remote prefill: another machine prefills a prompt, and its sealed pages are fetched (`--prefill-from`).

Nothing is trusted: each page arrives in its file format and must equal the requested file. A machine that fails or sends something else
costs at most the local computation of the prompt.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Event, Thread, Timer
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ...errors import one_line
from ...util.tcp import keep_alive
from ..pages import PAGE
from ..prefix_tree import token_bytes
from .backend import PageSource
from .pagefile import Entry, checksum, parsed

PREFILL, PAGES = "/v1/kv/prefill", "/v1/kv/pages"
"""Paths of a server with `--kv-producer` (`server/routers/kv_transfer.py`)."""
LEAST_TOKENS = 4 * PAGE
"""Minimum missing tokens for a remote prefill."""
_LARGEST_ID = 2**31 - 1
"""Keys of image rows are above all token ids."""
RETRY_S = 10.0
"""Seconds between a failure and the next request to the other machine."""
_CONNECT_S = 5.0
_PATIENCE_S, _TOKEN_S, _BYTE_S = 60.0, 0.01, 1e-6
"""Timeouts in seconds per answer, per token of a prefilled prompt, and per byte of pages. A machine that disappeared is detected earlier
(`keep_alive`)."""
_ANSWERS = 1024
"""Maximum number of unclaimed answers."""
_LISTED = 1 << 16
"""Maximum number of known remote pages."""
_LIST_BYTES, _ERROR_BYTES = 16 << 20, 1 << 14
_FAULTS = (OSError, HTTPException, ValueError, TypeError, KeyError, RecursionError)
"""Errors of arbitrary answers; RecursionError is from deeply nested JSON."""


class _RefusedError(ValueError):
    """The other machine refuses this request."""


class PeerStorage(PageSource):
    """Prefix cache of the server at a URL."""

    def __init__(self, url: str, api_key: str = "", *, note: Callable[[str], None] | None = None) -> None:
        """Create a client for a URL of `EngineArgs`. `note` is called from any thread with one line if the machine cannot be used."""
        super().__init__("mlxinfer-prefill-reader", note)
        parts = urlsplit(url)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._address = parts.hostname or "", parts.port or (443 if self._secure else 80)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._root = b""
        self._problem: Exception | None = None
        self._asking: set[int] = set()
        self._answered: set[int] = set()
        self.received_bytes = 0
        """Bytes of received pages and headers."""

    @property
    def off(self) -> bool:
        if self.note and monotonic() >= self._retry_at:
            self.note = ""
        return bool(self.note) or self._closed

    def opened(self, root: bytes, tokens: Sequence[int] = (), reused: Callable[[], int] = lambda: 0) -> bool:
        """Return True once the other machine has listed its pages of a prompt. The first call requests the prefill.

        Only the first opened root counts, which has no adapter, because requests have tokens only.
        """
        self._root = self._root or root
        if root != self._root:
            return True
        key = hash(token_bytes(tokens))
        with self._lock:
            if key in self._answered:
                self._answered.remove(key)
                return True
            if key in self._asking:
                return False
            # The last token is computed here for its logits. A request has token ids only, so prompts with images stay here.
            if self.off or len(tokens) - 1 - reused() < LEAST_TOKENS or max(tokens) > _LARGEST_ID:
                return True
            self._asking.add(key)
            self._looking += 1
        Thread(target=self._ask, args=(key, root, list(tokens[:-1])), name="mlxinfer prefill", daemon=True).start()
        return False

    def _ask(self, key: int, root: bytes, tokens: list[int]) -> None:
        try:
            with self._post(PREFILL, {"root": root.hex(), "tokens": tokens}, len(tokens) * _TOKEN_S) as answer:
                listed = json.loads(answer.read(_LIST_BYTES))["pages"]
            names = [name for one in listed if isinstance(one, str) and (name := parsed(one))]
            with self._lock:
                if sum(map(len, self._present.values())) > _LISTED:
                    self._present.clear()
                    self._behind.clear()
                self._present.setdefault(root, set()).update(names)
                for name in names:
                    self._behind.setdefault(root, {}).setdefault(name.parent, set()).add(name)
        except _RefusedError:
            pass  # only this prompt fails, for example beyond the other machine's context
        except _FAULTS as error:
            self._fail(error)
        finally:
            with self._lock:
                self._asking.discard(key)
                if len(self._answered) >= _ANSWERS:
                    self._answered.clear()
                self._answered.add(key)
                self._looking -= 1
                self._lock.notify_all()

    def _fill(self, entries: Sequence[Entry], data: np.ndarray) -> int:
        good = 0
        try:
            wanted = [[entry.digest.hex(), entry.parent.hex(), entry.part] for entry in entries]
            with self._post(PAGES, {"root": entries[0].root.hex(), "pages": wanted}, data.nbytes * _BYTE_S) as answer:
                for entry, row in zip(entries, data, strict=True):
                    head = bytearray(len(entry.head(0)))
                    if not _fully(answer, head) or not _fully(answer, row.data):
                        break  # evicted meanwhile, or the machine is gone
                    self.received_bytes += len(head) + row.nbytes
                    if entry.head(checksum(row)) != head:
                        raise ValueError("it sent what was not asked for")
                    good += 1
        except _FAULTS as error:
            self._problem = error
        return good

    def _read(self, batches: Sequence[Sequence[Entry]], ticket: object) -> None:
        super()._read(batches, ticket)
        problem, self._problem = self._problem, None
        if problem is not None:  # after all valid data has arrived
            self._fail(problem)

    @contextmanager
    def _post(self, path: str, body: dict[str, Any], more_s: float) -> Iterator[HTTPResponse]:
        """Return the answer, with a timeout extended by `more_s` seconds."""
        host, port = self._address
        connection = (HTTPSConnection if self._secure else HTTPConnection)(host, port, timeout=_CONNECT_S)
        connection.connect()
        sock, patience_s = connection.sock, _PATIENCE_S + more_s
        sock.settimeout(patience_s)
        keep_alive(sock)
        late = Event()
        end = Timer(patience_s, _shut_down, [sock, late])
        end.daemon = True
        end.start()
        try:
            connection.request("POST", path, json.dumps(body), {**self._headers, "Connection": "close"})
            answer = connection.getresponse()
            if answer.status != 200:
                kind = _RefusedError if answer.status == 400 else ConnectionError
                raise kind(f"it answers {answer.status}: {_told(answer.read(_ERROR_BYTES))}")
            yield answer
        finally:
            end.cancel()
            connection.close()
            if late.is_set():
                raise TimeoutError(f"it has not answered in {patience_s:.0f} s")

    def _fail(self, error: Exception) -> None:
        self._turn_off(f"prompts are read here, not at {self.url}: {one_line(error)}", RETRY_S)


def _told(body: bytes) -> str:
    """Return an error's message for users."""
    try:
        return str(json.loads(body)["error"]["message"])
    except _FAULTS:
        return body.decode(errors="replace")


def _shut_down(sock: socket.socket, late: Event) -> None:
    """Shut down a connection, encrypted or not, on which another thread waits."""
    late.set()
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _fully(answer: HTTPResponse, target: bytearray | memoryview) -> bool:
    """Fill the target; False if the answer ends early."""
    rest = memoryview(target).cast("B")
    while rest:
        count = answer.readinto(rest)
        if not count:
            return False
        rest = rest[count:]
    return True
