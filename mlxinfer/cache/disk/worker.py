"""A thread that does one thing after another, for the disk tier."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

Job = Callable[[], None]


class Worker:
    """Does jobs in order until it is closed. It never keeps the process from ending: a job that is cut then leaves no harm."""

    def __init__(self, name: str, *, nice: int = 0) -> None:
        """`nice` lowers its priority, on Linux, where a thread has one of its own."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._nice = nice
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Wait so long for what was added; whether all of it is done."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._nice and hasattr(os, "sched_getaffinity"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while job := self._jobs.get():
            job()
