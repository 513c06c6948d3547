"""`serve --detach` and `stop`: a server in the background, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes.short_paths import short_directory


@pytest.fixture
def mlxinfer() -> Any:
    """Run the command line as a program, with a socket of its own."""
    with short_directory() as folder:
        (folder / "own").mkdir(mode=0o700)
        environment = {**os.environ, "MLXINFER_SOCKET": str(folder / "own" / "api.sock")}

        def run(*words: str) -> tuple[int, str, str]:
            found = subprocess.run([sys.executable, "-m", "mlxinfer", *words], env=environment, capture_output=True, text=True, timeout=120)
            return found.returncode, found.stdout, found.stderr

        yield run
        run("stop")


def test_a_server_is_started_used_and_ended(mlxinfer: Any, chat_model: str) -> None:
    code, out, err = mlxinfer("serve", f"tiny={chat_model}", "--detach")
    assert (code, out.startswith("ready on unix:")) == (0, True), err
    assert "mlxinfer stop ends it" in err
    log = Path(err.partition("log ")[2].partition(";")[0])
    assert log.stat().st_mode & 0o777 == 0o600
    assert mlxinfer("run", "tiny", "hello", "--max-tokens", "3", "--temperature", "0")[0] == 0
    assert mlxinfer("ps")[1].splitlines()[1].startswith("tiny ")
    assert mlxinfer("stop", "tiny")[::2] == (0, "tiny is unloaded once its answers have ended\n")
    assert mlxinfer("stop")[::2] == (0, "the server has ended\n")
    assert mlxinfer("ps")[0] == 2


def test_a_server_that_cannot_start_says_why(mlxinfer: Any, tmp_path: Path) -> None:
    code, out, err = mlxinfer("serve", str(tmp_path / "nosuch"), "--detach")
    assert (code, out, err) == (2, "", f"mlxinfer: no such file or directory: {tmp_path / 'nosuch'}\n")
