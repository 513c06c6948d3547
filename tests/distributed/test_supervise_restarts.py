"""An error that ends the first start of a rank does not end one whose group was there before: its cause may go away again."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from mlxinfer.distributed import supervise
from mlxinfer.distributed.supervise import CHILD, LOST, Supervisor

_RANK = f"""
import os, sys, urllib.error, urllib.request
from pathlib import Path
starts = Path(sys.argv[1])
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("." * (number + 1))
if number == 0:  # is ready, and loses its group
    os.write(int(os.environ["{CHILD}"].split(":")[0]), b".")
    sys.exit({LOST})
if number < 4:  # its address has gone, which is a user's error
    sys.exit(2)
try:
    urllib.request.urlopen(f"http://127.0.0.1:{{sys.argv[2]}}/health", timeout=20)
except urllib.error.HTTPError as error:
    starts.with_suffix(".status").write_text(str(error.code))
"""


def test_the_server_says_503_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_BACK_OFF_S", 0.001)
    starts = tmp_path / "starts"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", _RANK, str(starts), str(listener.getsockname()[1])]
        assert Supervisor(command, [listener]).run() == 0
    assert json.dumps([len(starts.read_text()), starts.with_suffix(".status").read_text()]) == '[5, "503"]'


def test_pauses_grow_until_a_process_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    answer = Supervisor._answer_until

    def noting(self: Supervisor, pipe: int | None, seconds: float | None) -> None:
        if pipe is None:
            assert seconds is not None
            pauses.append(seconds)
            seconds = 0.0
        answer(self, pipe, seconds)

    monkeypatch.setattr(Supervisor, "_answer_until", noting)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Supervisor([sys.executable, "-c", _RANK, str(tmp_path / "starts"), str(listener.getsockname()[1])], [listener]).run()
    assert pauses == [0.0, 1.0, 2.0, 4.0]
