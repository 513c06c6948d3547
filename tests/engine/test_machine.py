from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from mlxinfer.engine import machine
from mlxinfer.engine.machine import allowed_threads, measure_machine, peak_rss


def test_rates_are_those_of_a_machine() -> None:
    found = measure_machine(1)
    assert found.buffer_bytes == 2**24
    assert found.device
    assert 1e7 < found.read_bytes < 1e14
    assert 1e7 < found.copy_bytes < 1e14
    assert 1e7 < found.operations < 1e16


def test_rates_follow_from_the_quickest_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_best", lambda once: 2.0)
    found = measure_machine(2**25)
    assert (found.buffer_bytes, found.read_bytes, found.copy_bytes) == (2**25, 2**24, 2**25)
    assert found.operations == found_side() ** 3


def found_side() -> int:
    return machine._SIDE["gpu" if machine.is_gpu() else "cpu"]


@pytest.mark.parametrize(("setting", "threads"), [("3", 3), ("0", None), ("many", None), ("", None), ("²", None)])
def test_threads_follow_the_setting_or_the_processors_allowed(monkeypatch: pytest.MonkeyPatch, setting: str, threads: int | None) -> None:
    monkeypatch.setenv("MLXINFER_THREADS", setting)
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert allowed_threads() == (threads or allowed)


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_rss()
    held = np.ones(before + 2**26, np.uint8)
    assert peak_rss() >= held.nbytes
