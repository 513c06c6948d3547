"""Ctrl-C while modules are imported: it ends the process at once, as an import may swallow the exception or print it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def raise_interrupts() -> None:
    """Ctrl-C raises KeyboardInterrupt from here on, so that files are closed and terminals restored. Until here it ended the process
    (`mlxinfer.__main__`)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Ctrl-C ends the process within the block, which imports modules and has nothing to clean up."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def was_interrupted(error: BaseException | None) -> bool:
    """An exception that came of KeyboardInterrupt: extension modules turn one into an ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _end(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
