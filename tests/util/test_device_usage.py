from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.util import device
from mlxinfer.util.device import DeviceMemory, allowed_threads, device_memory, peak_rss, rounds_float32


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
    script = "from mlxinfer.util.device import peak_rss; print(peak_rss())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 2**20 < int(done.stdout) < held.nbytes


def test_an_nvidia_gpu_has_memory_of_its_own_and_rounds_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"total_memory": 80_000_000_000, "free_memory": 1, "architecture": "sm_90"})
    assert device_memory() == DeviceMemory(80_000_000_000, 64_000_000_000, "GPU memory")
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    assert rounds_float32()
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert not rounds_float32()
