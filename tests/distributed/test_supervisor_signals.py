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

    def say(line: str) -> None:
        said.append(line)
        Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(supervise, "say", say)
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


_SAYS_READY = """
import os, time
from mlxinfer.distributed.supervise import say_ready
reading, writing = os.pipe()
os.close(reading)  # as the system does when the supervisor is killed
say_ready(writing)
time.sleep(90)
"""


def test_a_process_whose_supervisor_was_killed_ends() -> None:
    done = subprocess.run([sys.executable, "-c", _SAYS_READY], timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM
