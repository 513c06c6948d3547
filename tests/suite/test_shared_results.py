"""Processes of a test run share results, and the weekly run has all slow tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.processes.once_per_run import once_per_run

TESTS = Path(__file__).parents[1]


class Directories:
    """Stands for pytest's factory in one process of a run."""

    def __init__(self, base: Path) -> None:
        self._base = base
        base.mkdir(exist_ok=True)

    def getbasetemp(self) -> Path:
        return self._base


def shared(base: Path, make: Any) -> Any:
    return once_per_run(Directories(base), "one", make)  # type: ignore[arg-type]


def test_all_processes_of_a_run_have_the_first_ones_result(tmp_path: Path) -> None:
    assert shared(tmp_path / "popen-gw0", lambda: 1) == shared(tmp_path / "popen-gw1", lambda: 2) == 1
    assert shared(tmp_path / "alone", lambda: 3) == 3


def test_another_run_makes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a test of a process of xdist has started: its folder is next to those of earlier runs."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert shared(tmp_path / "pytest-1", lambda: 1) == 1
    assert shared(tmp_path / "pytest-2", lambda: 2) == 2


def test_half_a_result_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def ended(path: Path, text: str, **options: Any) -> int:
        write(path, text[:3], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", ended)
        with pytest.raises(KeyboardInterrupt):
            shared(tmp_path / "run", lambda: [1, 2, 3])
    assert shared(tmp_path / "run", lambda: [4, 5, 6]) == [4, 5, 6]


def test_each_sunday_all_slow_tests_run() -> None:
    workflow = (TESTS.parent / ".github" / "workflows" / "slow.yml").read_text(encoding="utf-8")
    found = re.search(r"folder: \[(.+)\]", workflow)
    assert found is not None
    named = {each.strip(' "') for each in found[1].split(",")}
    slow = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py") if "mark" + ".slow" in path.read_text(encoding="utf-8")]
    assert {path.parts[0] if len(path.parts) > 1 else "test_*.py" for path in slow} == named
