"""Entry point of `mlxinfer` and `python -m mlxinfer`.

Importing the command line takes 0.1 s. Ctrl-C ends the process silently from the first line.
"""

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than all else here
    from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main() -> "NoReturn":
    """Run the command line and exit with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if the parent process ignores it (nohup)
        signal.signal(signal.SIGINT, _end)
    from .cli import main as command_line

    command_line()


def _end(*_: object) -> "NoReturn":
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
