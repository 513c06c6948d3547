"""Work that nobody waits for, after a model was loaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

_TURN_S = 0.05


class _Later(threading.Thread):
    def __init__(self, work: Callable[[], None], delay_s: float, nice: int, daemon: bool) -> None:
        super().__init__(name="mlxinfer-packed", daemon=daemon)
        self._work, self._delay_s, self._nice = work, delay_s, nice
        self.now = threading.Event()

    def run(self) -> None:
        waited = 0.0
        # The main thread counts as ended once the program has, while this one still runs.
        while waited < self._delay_s and threading.main_thread().is_alive() and not self.now.wait(_TURN_S):
            waited += _TURN_S
        _give_way(self._nice)
        try:
            self._work()
        finally:
            del self._work


_threads: list[_Later] = []
_lock = threading.Lock()


def later(work: Callable[[], None], *, delay_s: float, nice: int, whole: bool) -> None:
    """Do it after so many seconds, with a priority that is lower by `nice`. `whole`: the process does not end before, nor wait with it
    once it ends; otherwise what is left then is left undone."""
    thread = _Later(work, delay_s, nice, daemon=not whole)
    with suppress(RuntimeError):  # no more threads, or the program ends already
        thread.start()
        with _lock:
            _threads[:] = [other for other in _threads if other.is_alive()] + [thread]


def finish_background_work() -> None:
    """Do at once what is to be done, and wait for it."""
    with _lock:
        threads, _threads[:] = list(_threads), []
    for thread in threads:
        thread.now.set()
    for thread in threads:
        thread.join()


def _give_way(nice: int) -> None:
    """On Linux a thread has a priority of its own."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
