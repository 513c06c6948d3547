"""Handling of Ctrl-C during imports: it ends the process at once, because an import may swallow or print the exception."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, so that files are closed and terminals restored.

    Before this call it ends the process (`mlxinfer.__main__`).
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Let Ctrl-C end the process inside the block, which only imports modules."""
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
    """Return True for an exception caused by KeyboardInterrupt; extension modules convert it to ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _end(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)
