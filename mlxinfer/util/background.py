"""Work after a model was loaded, in threads that give way to everything else and do not hold up the end of the process."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

EXIT_BUDGET_S = 0.2
"""Seconds that work may still take when the process ends."""

Stop = Callable[[], bool]
"""True when the work should stop: it is asked every few milliseconds."""
Work = Callable[[Stop], None]


def lower_thread_priority(nice: int) -> None:
    """Lower the calling thread's priority by `nice`, on Linux, where each thread has its own. Elsewhere, and where that is forbidden,
    nothing happens."""
    if nice and hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class _Later(threading.Thread):
    """Calls `work` after a delay. A daemon, as other threads would keep the process alive until their delay is over; but it must not run
    while the interpreter ends (native code that wants the interpreter's lock back would abort the process), so `_end` joins it."""

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
    """Call `work` after `delay_s` seconds, in a thread whose priority is lower by `nice`.

    When the process ends before `work` is done, it is stopped, and `at_exit` is called to go on for the rest of `EXIT_BUDGET_S`.
    """
    thread = _Later(work, at_exit, delay_s, nice)
    with suppress(RuntimeError), _lock:  # no more threads, or the interpreter ends already
        if not _threads:
            atexit.unregister(_end)
            atexit.register(_end)
        _threads[:] = [other for other in _threads if other.is_alive()]
        thread.start()
        _threads.append(thread)


def finish_background_work() -> None:
    """Do all of it now, and wait."""
    for thread in _take():
        thread.now.set()
        thread.join()


def _end() -> None:
    """At interpreter exit: stop what is running, and use the budget."""
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
    """A signal ends the process at once, as nothing is left to clean up; a handler in Python would only raise into the exit."""
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
