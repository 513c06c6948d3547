"""Starts the process of a rank again when its group is lost, and answers 503 on the server's sockets while there is none."""

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
from .agreement import say
from .control_channel import BEAT_S

LOST = GroupLostError.exit_code
CHILD = "MLXINFER_RANK_CHILD"
"""The environment's variable that a rank's own process has: the descriptor of a pipe to write to when it is ready, then those of the
server's sockets."""
_BODY = {"message": "The machines that run the model are being joined. Ask again soon.", "type": "overloaded", "code": "group_down"}
_LAST_S = 2.0
"""Seconds that a client has to send a request that is refused."""
_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 30.0
"""Seconds before a process that failed otherwise is started again, twice as many each time; those that have lost their group are at
once."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STILL_S = 5.0
"""A process that was ready and says nothing for so long stands still: it could not notice either that its group is lost."""
_YOUNG_S = 10.0
"""A process that fails before it is so old, was never ready and has not lost its group would only fail again."""


class Supervisor:
    """Keeps the process of one rank running."""

    def __init__(self, command: Sequence[str], sockets: Sequence[socket.socket] = (), environment: Mapping[str, str] | None = None) -> None:
        """`sockets` are listening; the process accepts on them once it has said that it is ready, and the supervisor before."""
        self._command, self._sockets = list(command), list(sockets)
        for each in self._sockets:
            each.setblocking(False)  # a client may have left before it is accepted, and waiting for the next one would miss a signal
        self._environment = dict(os.environ if environment is None else environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = Event()
        self._was_ready = False
        """Whether any of its processes was: what keeps the next from starting may go away, such as an address without its cable."""
        self._failures = 0
        """Processes in a row that were not ready."""

    def run(self) -> int:
        """Until the process ends by itself, by a user's error before it was ever ready, or by a signal. Returns the exit status."""
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
                say("the group is lost: joining it again" if status == LOST else f"the process ended ({status}) and starts again")
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
            # In a session of its own: a terminal would send it each Ctrl-C too, and two of them cancel answers instead of ending them.
            self._process = subprocess.Popen(self._command, pass_fds=(writing, *descriptors), env=environment, start_new_session=True)
        finally:
            os.close(writing)
        if self._ending.is_set():  # a signal that came while it was started has not reached it
            self._process.terminate()
        try:
            self._answer_until(reading, None)
            if os.read(reading, 1):
                self._was_ready, self._failures = True, 0
                if not _lives_until_end(reading):
                    say("the process stands still, and is ended")
                    self._process.kill()
        finally:
            os.close(reading)
        return self._process.wait()

    def _answer_until(self, pipe: int | None, seconds: float | None) -> None:
        """Answer 503 until the pipe says something or is closed, or for so long."""
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
    """Wait until a process that is ready closes its end of the pipe. False once it has been silent for too long."""
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
        while connection.recv(65536) and monotonic() < end:  # a client that still sends would not see the answer if this end were closed
            pass


def child_descriptors() -> list[int] | None:
    """The pipe and the sockets of a process that a supervisor has started; None in any other process."""
    found = os.environ.pop(CHILD, None)
    return None if found is None else [int(number) for number in found.split(":")]


def say_ready(pipe: int) -> None:
    """Tell the supervisor to leave the sockets to this process, and from now on that it lives."""

    def live() -> None:
        with suppress(OSError):
            while True:
                os.write(pipe, b".")
                Event().wait(BEAT_S)

    Thread(target=live, name="mlxinfer alive", daemon=True).start()


def end_with_supervisor() -> None:
    """Have this process ended as by SIGTERM once the supervisor has gone, ready or not: nobody else would do so, as no terminal knows of
    it, and its sockets and ports could not be opened again."""
    supervisor = os.getppid()

    def watch() -> None:
        while os.getppid() == supervisor:
            Event().wait(BEAT_S)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=watch, name="mlxinfer supervised", daemon=True).start()


def own_command() -> list[str]:
    """The command line of this process, to be started again."""
    if sys.argv[0].endswith("__main__.py"):
        return [sys.executable, "-m", __package__.split(".")[0], *sys.argv[1:]]
    return [sys.executable, *sys.argv]
