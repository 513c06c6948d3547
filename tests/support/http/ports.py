"""TCP ports for tests that start servers."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack


def free_port(count: int = 6) -> int:
    """The first of `count` consecutive free ports, below the system's range for clients."""
    for first in random.SystemRandom().sample(range(12000, 32000, count), 200):
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")
