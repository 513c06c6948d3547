"""How many rooms a token passes through: a step that grows new ones is noticed here."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from support.models.tiny_directory import tiny_directory

from benchmarks.walk import report, walks
from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())


def test_a_decode_step_stays_small(tmp_path: Path) -> None:
    found = walks(str(tiny_directory(tmp_path, eos=False)), steps=20, temperature=1.0)  # drafts hold in a greedy one
    assert median(len(walk.files) for walk in found) <= 18, report(found)
    assert median(walk.calls.total() for walk in found) <= 165, report(found, detail=True)
