from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from mlxinfer.device import allowed_threads, peak_rss


@pytest.mark.parametrize(
    ("setting", "threads"), [("3", 3), ("0", None), ("many", None), ("", None), ("²", None), ("9" * 5000, None), (" 2 ", 2)]
)
def test_threads_follow_the_setting_or_the_processors_allowed(monkeypatch: pytest.MonkeyPatch, setting: str, threads: int | None) -> None:
    monkeypatch.setenv("MLXINFER_THREADS", setting)
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert allowed_threads() == (threads or allowed)


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_rss()
    held = np.ones(before + 2**26, np.uint8)
    assert peak_rss() >= held.nbytes


@pytest.mark.skipif("MLXINFER_MAC_LIKE" in os.environ, reason="without /proc, Linux tells the parent's peak; a Mac does not")
def test_peak_memory_is_that_of_this_process_alone() -> None:
    held = np.ones(2**28, np.uint8)
    script = "from mlxinfer.device import peak_rss; print(peak_rss())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 2**20 < int(done.stdout) < held.nbytes
