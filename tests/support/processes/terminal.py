"""Programs on a terminal of their own."""

from __future__ import annotations

import signal

import pexpect


def end(child: pexpect.spawn) -> None:
    """End it for certain. `child.close(force=True)` gives a killed process a tenth of a second, and fails where the machine is busy."""
    if child.isalive():
        child.kill(signal.SIGKILL)
        child.wait()
    child.close()
