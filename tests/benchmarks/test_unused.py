"""The benchmarks of what costs nothing when it is not used, and of cells that are interrupted."""

from __future__ import annotations

from pathlib import Path

from support.models.tiny_directory import tiny_directory

from benchmarks.interrupted import Interrupted
from benchmarks.interrupted import table as interrupts
from benchmarks.unused import Unused, measure, table


def test_a_step_is_measured_with_and_without_what_it_asks(tmp_path: Path) -> None:
    found = measure(tiny_directory(tmp_path / "tiny", eos=False, context=4096), 2, 2)
    assert found.streams == 2
    assert 0 < found.hooks_us < 1e3 * found.step_ms  # a step asks once
    assert 0 < found.adapters_us < 1e3 * found.step_ms
    assert found.hooks[0] <= found.hooks[1] <= found.hooks[2]
    whole, no_adapters, no_hooks = found.instructions
    assert no_adapters < whole < 1.05 * no_adapters  # one question, of a few instructions for each sequence
    assert no_hooks < whole < 1.05 * no_hooks


def test_the_tables() -> None:
    text = table([Unused(1, 4.0, 1.0, 2.0, (-0.01, 0.001, 0.02), (-0.02, 0.0, 0.01), (5000.0, 4980.0, 4990.0))])
    assert "| 1 | 4.00 | 1.00 µs | 0.025% | +0.10% (-1.00% to +2.00%) | 2.00 µs | 0.050% | +0.00% (-2.00% to +1.00%) |" in text
    assert "Bytecode instructions of a step of 1: 5000; for hooks 10 of them (0.20%), for adapters 20 (0.40%)." in text
    text = interrupts("m", [Interrupted("sleeping", (0.001, 0.002, 0.003), 0), Interrupted("an answer", (0.01, 0.02, 0.09), 3)])
    assert "| sleeping | 2 | 3 |  |" in text
    assert "| an answer | 20 | 90 | 3 of 3 |" in text
