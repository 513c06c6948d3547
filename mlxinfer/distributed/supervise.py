"""Restarts the process of a rank whose group is lost, and answers 503 on the server's sockets meanwhile."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Event, Thread
from time import monotonic
from types import FrameType

from ..errors import GroupLostError
from .agreement import log_line
from .control_channel import BEAT_S

LOST = GroupLostError.exit_code
CHILD = "MLXINFER_RANK_CHILD"
"""Environment variable of a rank's process: descriptor of the pipe that reports readiness, then those of the server's sockets."""
_BODY = {"message": "The machines that run the model are being joined. Ask again soon.", "type": "overloaded", "code": "group_down"}
_LAST_S = 2.0
"""Seconds that a client has to send a refused request."""
_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 30.0
"""Seconds before a restart after other failures, doubled each time. After the loss of a group the restart is immediate."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STILL_S = 5.0
"""A process that was ready and is silent for this many seconds counts as stalled, and would not notice the loss of its group."""
_YOUNG_S = 10.0
"""Do not restart a process that failed within this many seconds without ever being ready."""


class Supervisor:
    """Keeps the process of one rank running."""

    def __init__(self, command: Sequence[str], sockets: Sequence[socket.socket] = (), environment: Mapping[str, str] | None = None) -> None:
        """`sockets` are listening. The process accepts on them once it is ready; until then the supervisor does."""
        self._command, self._sockets = list(command), list(sockets)
        for each in self._sockets:
            each.setblocking(False)  # a client may disconnect before `accept`, which would then block and miss signals
        self._environment = dict(os.environ if environment is None else environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = Event()
        self._was_ready = False
        """True once any process was ready. Faults after that may pass, such as an unplugged cable."""
        self._failures = 0
        """Consecutive processes that were never ready."""

    def run(self) -> int:
        """Run until the process ends, fails by a user's error before it was ever ready, or a signal arrives. Returns the exit status."""
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # by nohup
        before = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON if number not in ignored}
        try:
            while True:
                began, self._failures = monotonic(), self._failures + 1
                status = self._once()
                if self._ending.is_set() or status == 0 or (status == 2 and not self._was_ready):
                    return max(status, 0)
                if status != LOST and not self._was_ready and monotonic() - began < _YOUNG_S:
                    return 1
                log_line("the group is lost: joining it again" if status == LOST else f"the process ended ({status}) and starts again")
                pause = min(_BACK_OFF_S * 2 ** min(max(self._failures - 1, 0), 10), _LONGEST_BACK_OFF_S)
                self._answer_until(None, pause if status != LOST else 0.0)
                if self._ending.is_set():
                    return 0
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _once(self) -> int:
        """Start the process, and wait until it ends."""
        reading, writing = os.pipe()
        descriptors = [each.fileno() for each in self._sockets]
        environment = self._environment | {CHILD: ":".join(map(str, (writing, *descriptors)))}
        try:
            # A session of its own: a terminal would also send it each Ctrl-C, and the second one cancels answers.
            self._process = subprocess.Popen(self._command, pass_fds=(writing, *descriptors), env=environment, start_new_session=True)
        finally:
            os.close(writing)
        if self._ending.is_set():  # a signal during the start has not reached the process
            self._process.terminate()
        try:
            self._answer_until(reading, None)
            if os.read(reading, 1):
                self._was_ready, self._failures = True, 0
                if not _lives_until_end(reading):
                    log_line("the process stands still, and is ended")
                    self._process.kill()
        finally:
            os.close(reading)
        return self._process.wait()

    def _answer_until(self, pipe: int | None, seconds: float | None) -> None:
        """Answer 503 for `seconds`, or until `pipe` is written to or closed."""
        watched = [each.fileno() for each in self._sockets] + ([] if pipe is None else [pipe])
        end = None if seconds is None else monotonic() + seconds
        while not self._ending.is_set() or pipe is not None:
            ready, _, _ = select.select(watched, [], [], None if end is None else max(end - monotonic(), 0))
            if not ready or pipe in ready:
                return
            for listener in self._sockets:
                if listener.fileno() in ready:
                    with suppress(OSError):
                        Thread(target=_refuse, args=(listener.accept()[0],), daemon=True).start()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._ending.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def _lives_until_end(pipe: int) -> bool:
    """Wait until a ready process closes its end of the pipe. Returns False once it has been silent for too long."""
    while select.select([pipe], [], [], _STILL_S)[0]:
        if not os.read(pipe, 64):
            return True
    return False


def _refuse(connection: socket.socket) -> None:
    """Answer one request with 503."""
    body = json.dumps({"error": {**_BODY, "param": None}}).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    end = monotonic() + _LAST_S
    with suppress(OSError), connection:
        connection.settimeout(_LAST_S)
        connection.recv(65536)
        connection.sendall(f"{head}retry-after: 2\r\nconnection: close\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536) and monotonic() < end:  # closing while the client still sends would discard the answer
            pass


def child_descriptors() -> list[int] | None:
    """Return the pipe and the sockets if a supervisor started this process, otherwise None."""
    found = os.environ.pop(CHILD, None)
    return None if found is None else [int(number) for number in found.split(":")]


def say_ready(pipe: int) -> None:
    """Report readiness to the supervisor, which then leaves the sockets to this process, and keep reporting life."""

    def live() -> None:
        with suppress(OSError):
            while True:
                os.write(pipe, b".")
                Event().wait(BEAT_S)

    Thread(target=live, name="mlxinfer alive", daemon=True).start()


def end_with_supervisor() -> None:
    """End this process as by SIGTERM once the supervisor is gone.

    No terminal would end it, and its sockets and ports would stay in use.
    """
    supervisor = os.getppid()

    def watch() -> None:
        while os.getppid() == supervisor:
            Event().wait(BEAT_S)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=watch, name="mlxinfer supervised", daemon=True).start()


def own_command() -> list[str]:
    """Return the command line of this process, for a restart."""
    if sys.argv[0].endswith("__main__.py"):
        return [sys.executable, "-m", __package__.split(".")[0], *sys.argv[1:]]
    return [sys.executable, *sys.argv]
