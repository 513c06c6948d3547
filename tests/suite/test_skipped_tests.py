"""Tests that cannot run on a machine are skipped with a reason, and the last line of a run lists the reasons."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.kernels.fake_clang import install_compiler
from support.processes.optional import needs

from mlxinfer.kernels_metal.emulator.toolchain import why_not

TESTS = Path(__file__).parents[1]
SETTINGS = "[pytest]\nmarkers =\n    emulator\n    metal\n    model\n    torch\n    slow\n    exact\n"
HERE = """
import pytest
from mlxinfer.kernels_metal.emulator import Unavailable, build

def test_passes(): pass

@pytest.mark.parametrize("n", range(3))
def test_skips(n): pytest.skip("no printer")

@pytest.mark.slow
def test_is_left_out(): assert False
"""
RACES = """
@pytest.mark.emulator
@pytest.mark.parametrize("n", range(2))
def test_races(n): build.toolchain("tsan")

def test_is_told(): pytest.raises(Unavailable, build.toolchain, "tsan")
"""
MODULE = """
from support.processes.optional import needs
needs("no_such_library.part")
"""
REASONS = ["3 no printer", "1 whole module: no_such_library is not installed (make test installs it)"]


def _last_line(folder: Path, files: dict[str, str], *options: str, **environment: str) -> tuple[str, str]:
    """Return the counts of passed and other tests, and the text after them."""
    for name, text in {"pytest.ini": SETTINGS, "conftest.py": (TESTS / "conftest.py").read_text(), **files}.items():
        (folder / name).write_text(text)
    variables = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "HOME": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, counts, last = done.stdout.splitlines()
    return counts, last


@pytest.mark.long
@pytest.mark.parametrize("processes", [0, 2])
def test_the_last_line_lists_what_was_skipped(tmp_path: Path, processes: int) -> None:
    """With several processes, deselected tests are not counted."""
    needs("xdist")
    options = ("-p", "xdist", "-n", str(processes)) if processes else ()
    counts, last = _last_line(tmp_path, {"test_here.py": HERE, "test_module.py": MODULE}, *options)
    assert counts.startswith("1 passed, 4 skipped" if processes else "1 passed, 4 skipped, 1 deselected")
    assert last == f"skipped: {' | '.join(REASONS)}"


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="elsewhere there is no emulator")
def test_a_sanitizer_that_cannot_be_had(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    install_compiler(programs, "clang++", "21.0.0", refused="-fsanitize=thread")
    counts, last = _last_line(tmp_path, {"test_here.py": HERE + RACES}, PATH=str(programs))
    if "lacks" in (why_not() or ""):
        pytest.skip("this processor cannot run the emulator")
    assert counts.startswith("2 passed, 5 skipped, 1 deselected")
    assert last.startswith(
        "skipped: 3 no printer | 2 no ThreadSanitizer for Metal kernels: clang++ 21: cannot link -fsanitize=thread: undefined"
    )


def test_nothing_is_said_where_nothing_was_skipped(tmp_path: Path) -> None:
    _, last = _last_line(tmp_path, {"test_here.py": "def test_passes(): pass"})
    assert last.startswith("1 passed")
