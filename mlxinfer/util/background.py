"""Low-priority background work that does not delay the end of the process."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

EXIT_BUDGET_S = 0.2
"""Seconds that background work may use at process exit."""

Stop = Callable[[], bool]
"""Returns True when the work should stop; work calls it every few milliseconds."""
Work = Callable[[Stop], None]


def lower_thread_priority(nice: int) -> None:
    """Lower the calling thread's priority by `nice` on Linux, where priorities are per thread. Does nothing elsewhere or if forbidden."""
    if nice and hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class _Later(threading.Thread):
    """Calls `work` after a delay.

    A daemon thread, because another thread would delay the process's end. `_end` joins it, because native code that requests the GIL during
    finalization aborts the process.
    """

    def __init__(self, work: Work, at_exit: Work | None, delay_s: float, nice: int) -> None:
        super().__init__(name="mlxinfer-later", daemon=True)
        self.work: Work | None = work
        self.now, self.ending = threading.Event(), threading.Event()
        self.at_exit = at_exit
        self._delay_s, self._nice = delay_s, nice

    def run(self) -> None:
        self.now.wait(self._delay_s)
        lower_thread_priority(self._nice)
        assert self.work is not None
        self.work(self.ending.is_set)
        if not self.ending.is_set():
            self.work = None


_threads: list[_Later] = []
_lock = threading.Lock()


def later(work: Work, *, at_exit: Work | None = None, delay_s: float, nice: int) -> None:
    """Call `work` after `delay_s` seconds in a thread with a priority lowered by `nice`.

    If the process ends before `work` is done, the work is stopped and `at_exit` continues for the rest of `EXIT_BUDGET_S`.
    """
    thread = _Later(work, at_exit, delay_s, nice)
    with suppress(RuntimeError), _lock:  # no more threads, or the interpreter is ending
        if not _threads:
            atexit.unregister(_end)
            atexit.register(_end)
        _threads[:] = [other for other in _threads if other.is_alive()]
        thread.start()
        _threads.append(thread)


def finish_background_work() -> None:
    """Run all pending work now and wait for it."""
    for thread in _take():
        thread.now.set()
        thread.join()


def _end() -> None:
    """Stop running work at interpreter exit and use the budget for the rest."""
    with _default_signals():
        threads, until = _take(), perf_counter() + EXIT_BUDGET_S
        for thread in threads:
            thread.ending.set()
            thread.now.set()
        for thread in threads:
            thread.join()
        for thread in threads:
            if thread.at_exit and thread.work is not None:
                thread.at_exit(lambda: perf_counter() >= until)


def _take() -> list[_Later]:
    with _lock:
        threads, _threads[:] = list(_threads), []
    return threads


@contextmanager
def _default_signals() -> Iterator[None]:
    """Let signals end the process at once: nothing is left to clean up, and a Python handler would raise during exit."""
    signals = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(s))]
    try:
        before = {s: signal.signal(s, signal.SIG_DFL) for s in signals}
    except ValueError:  # not the main thread
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
