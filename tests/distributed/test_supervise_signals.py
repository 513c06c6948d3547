"""A supervisor that ends, in whatever way, leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from mlxinfer.distributed import supervise
from mlxinfer.distributed.supervise import CHILD, Supervisor

_READY_AND_FAILS = f"""
import os, sys
with open(sys.argv[1], "a") as file:
    file.write("started ")
os.write(int(os.environ["{CHILD}"].split(":")[0]), b".")
sys.exit(7)
"""
_WAITS = "import time; time.sleep(90)"


def test_a_signal_before_the_next_start_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_BACK_OFF_S", 0.4)
    said: list[str] = []

    def log_line(line: str) -> None:
        said.append(line)
        Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(supervise, "log_line", log_line)
    started = tmp_path / "started"
    assert Supervisor([sys.executable, "-c", _READY_AND_FAILS, str(started)]).run() == 0
    assert said == ["the process ended (7) and starts again"]
    assert started.read_text() == "started "


def test_a_signal_during_the_start_reaches_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start = supervise.subprocess.Popen

    def signalled(*args: Any, **settings: Any) -> Any:
        found = start(*args, **settings)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(supervise.subprocess, "Popen", signalled)
    supervisor = Supervisor([sys.executable, "-c", _WAITS])
    guard = Timer(10, lambda: supervisor._process and supervisor._process.kill())
    guard.start()
    assert supervisor.run() == 0
    assert guard.is_alive()
    guard.cancel()


_RANK = """
import os, sys, time
from mlxinfer.distributed.supervise import child_descriptors, end_with_supervisor, say_ready
pipe, *_ = child_descriptors()
end_with_supervisor()
if sys.argv[1] == "ready":
    say_ready(pipe)
print(os.getpid(), flush=True)
time.sleep(90)
"""
_SUPERVISES = """
import sys
from mlxinfer.distributed.supervise import Supervisor
sys.exit(Supervisor([sys.executable, "-c", *sys.argv[1:]]).run())
"""


@pytest.mark.parametrize("when", ["before", "ready"])
def test_a_process_whose_supervisor_was_killed_ends(when: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _SUPERVISES, _RANK, when], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        rank = int(supervisor.stdout.readline())
        supervisor.kill()
        guard = Timer(60, os.kill, (rank, signal.SIGKILL))
        guard.start()
        assert supervisor.stdout.read() == b""  # as soon as nobody has the other end
        assert guard.is_alive()
        guard.cancel()


_COUNTS = """
import os, signal, sys, time
print("started", flush=True)
signal.signal(signal.SIGINT, lambda number, frame: (print("interrupted", flush=True), sys.exit(0)))
print("waits", flush=True)
time.sleep(90)
"""


def test_a_hang_up_that_is_ignored_reaches_nobody() -> None:
    """As nohup has it."""
    ignoring = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-c", _SUPERVISES, _COUNTS]
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert [supervisor.stdout.readline() for _ in range(2)] == ["started\n", "waits\n"]
        supervisor.send_signal(signal.SIGHUP)
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.stdout.readline() == "interrupted\n"
    assert supervisor.returncode == 0
