from __future__ import annotations

import pytest

from mlxinfer.bench import machine
from mlxinfer.bench.machine import measure_machine


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
