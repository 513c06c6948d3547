"""Work that may take longer than anybody wants to wait, in threads of which there are few."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class TooLongError(Exception):
    """It is not done yet, or cannot begin because others are not."""


class Deadline(Generic[T]):
    """Runs what cannot be interrupted. Any thread may use it."""

    def __init__(self, seconds: float, most_overdue: int) -> None:
        """`seconds`: how long is waited for a result. While `most_overdue` are over theirs, nothing further is begun."""
        self._seconds = seconds
        self._most_overdue = most_overdue
        self._lock = Lock()
        self._overdue = 0

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, which must not raise. Raises `TooLongError`."""
        with self._lock:
            if self._overdue >= self._most_overdue:
                raise TooLongError
        call = _Call(work)
        thread = Thread(target=self._finish, args=(call,), name="mlxinfer-compile", daemon=True)
        thread.start()
        thread.join(self._seconds)
        with self._lock:
            if not call.done:
                call.overdue = True
                self._overdue += 1
        if call.overdue:
            raise TooLongError
        if not call.results:
            raise RuntimeError("it broke off")  # what it raised is told by `threading.excepthook`
        return call.results[0]

    def _finish(self, call: _Call[T]) -> None:
        try:
            call.results.append(call.work())
        finally:
            with self._lock:
                call.done = True
                self._overdue -= call.overdue


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.results: list[T] = []
        self.done = self.overdue = False
