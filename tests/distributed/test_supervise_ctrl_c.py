"""One Ctrl-C in a terminal, which sends it to every process there, is one signal to the process that computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from mlxinfer.distributed.supervise import CHILD

_COUNTS = f"""
import os, signal, time
count = 0
def note(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, note)
os.write(int(os.environ["{CHILD}"].split(":")[0]), b".")
print("ready", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.3)
print(count, flush=True)
"""
_SUPERVISES = """
import sys
from mlxinfer.distributed import supervise
from mlxinfer.distributed.supervise import Supervisor
supervise._STILL_S = 60.0  # the process says once that it lives
sys.exit(Supervisor([sys.executable, "-c", sys.argv[1]]).run())
"""


def test_it_reaches_the_process_once() -> None:
    command = [sys.executable, "-c", _SUPERVISES, _COUNTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        os.killpg(supervisor.pid, signal.SIGINT)
        assert supervisor.stdout.readline() == "1\n"
    assert supervisor.returncode == 0
