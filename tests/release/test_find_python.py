"""`packaging/find-python.sh` finds a Python that can run mlxinfer, and the Makefile says where to get one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python(path: Path, *, new: bool, machine: str = "arm64") -> Path:
    """A program that answers as a Python of this kind, or fails."""
    return program(path, f"echo '{int(new)} {machine}'")


def found(tmp_path: Path, system: str = "Darwin") -> str:
    program(tmp_path / "bin" / "uname", f"echo {system}")
    environment = {"PATH": str(tmp_path / "bin"), "PYTHON_DIRS": f"{tmp_path / 'brew'}:{tmp_path / 'framework'}", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "packaging" / "find-python.sh")], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_the_python_of_the_path_is_taken_if_it_is_new_enough(tmp_path: Path) -> None:
    own = python(tmp_path / "bin" / "python3", new=True)
    python(tmp_path / "brew" / "python3.14", new=True)
    assert found(tmp_path) == str(own)


def test_a_stock_macs_python_is_passed_over(tmp_path: Path) -> None:
    python(tmp_path / "bin" / "python3", new=False)
    python(tmp_path / "brew" / "python3.11", new=True)
    newest = python(tmp_path / "framework" / "python3.13", new=True)
    assert found(tmp_path) == str(newest)


def test_one_for_intel_is_passed_over_on_apple_silicon(tmp_path: Path) -> None:
    intel = python(tmp_path / "bin" / "python3", new=True, machine="x86_64")
    arm = python(tmp_path / "brew" / "python3.12", new=True)
    assert found(tmp_path) == str(arm)
    assert found(tmp_path, "Linux") == str(intel)


def test_uvs_is_found_last(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "python3", "exit 1")
    managed = python(tmp_path / "uv" / "python3.13", new=True)
    program(tmp_path / "bin" / "uv", f"echo {managed}")
    assert found(tmp_path) == str(managed)


def test_without_any_it_says_nothing(tmp_path: Path) -> None:
    python(tmp_path / "bin" / "python3", new=False)
    assert found(tmp_path) == ""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_makefile_says_where_to_get_one(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "PYTHON=", f"VENV={tmp_path}/env", f"{tmp_path}/env/.created"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout.startswith("mlxinfer needs Python 3.10 or newer")
    assert "uv python install" in done.stdout
    assert "python.org/downloads" in done.stdout
    assert not (tmp_path / "env").exists()
