"""Examples that start other processes end them, also if they are ended before all are ready."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
_NEVER_READY = """
import os, pathlib, time
pathlib.Path(os.environ["STARTED"], str(os.getpid())).touch()
time.sleep(180)
"""


@pytest.mark.parametrize(("name", "package", "processes"), [("dynamo/serve.py", "dynamo", 3), ("router/two_workers.py", "mlxinfer", 2)])
def test_a_signal_before_they_are_ready_leaves_no_process(name: str, package: str, processes: int, tmp_path: Path) -> None:
    started = tmp_path / "started"
    (tmp_path / package).mkdir()
    started.mkdir()
    (tmp_path / package / "__init__.py").write_text(_NEVER_READY)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "STARTED": str(started)}
    with subprocess.Popen([sys.executable, str(EXAMPLES / name), "model"], env=environment, cwd=tmp_path) as example:
        deadline = time.monotonic() + 60
        while len(found := [int(each.name) for each in started.iterdir()]) < processes:
            assert time.monotonic() < deadline
            assert example.poll() is None
            time.sleep(0.02)
        example.send_signal(signal.SIGTERM)
        assert example.wait(60) == 0
    for process in found:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
