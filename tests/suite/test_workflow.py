"""The workflow of the tests: two jobs on each macOS share all tests, and another compiler's warnings fail no build."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
HALVES = ("gpu", "rest")


def rows(job: str) -> list[dict[str, str]]:
    return WORKFLOW["jobs"][job]["strategy"]["matrix"]["include"]


def run(command: list[str], *, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the checkout as if nothing called it: within make, its variables are inherited."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "HALF", "SWIFT"))}
    if path is not None:
        plain["PATH"] = f"{path}{os.pathsep}{plain['PATH']}"
    return subprocess.run(command, cwd=ROOT, env=plain | environment, capture_output=True, text=True, check=False)


def recipe(target: str, *variables: str, **options: Any) -> str:
    done = run(["make", "-n", target, f"PYTHON={sys.executable}", *variables], **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_macos_has_both_halves() -> None:
    macs = [(row["os"], row["half"]) for row in rows("test") if row["os"].startswith("macos")]
    assert sorted(macs) == [(system, half) for system in ("macos-14", "macos-15", "macos-26") for half in HALVES]
    assert [row for row in rows("test") if row["os"].startswith("ubuntu") and "half" in row] == []
    (step,) = (step for step in WORKFLOW["jobs"]["test"]["steps"] if step.get("run") == "bash .ci/run")
    assert step["env"]["HALF"] == "${{ matrix.half }}"


def files_of(half: str) -> set[Path]:
    """The files of tests that a half collects."""
    (line,) = (line for line in recipe("test", f"HALF={half}").splitlines() if " -m pytest " in line)
    words = shlex.split(line.partition(" -m pytest ")[2].partition(";")[0])
    chosen = [ROOT / word for word in words if word == "tests" or word.startswith("tests/")]
    ignored = [ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    assert all(folder.is_dir() for folder in [*chosen, *ignored])
    found = {file for folder in chosen for file in folder.rglob("test_*.py")}
    return {file for file in found if not any(file.is_relative_to(folder) for folder in ignored)}


def test_the_halves_have_every_file_once() -> None:
    gpu, rest = map(files_of, HALVES)
    assert not gpu & rest
    assert gpu | rest == set((ROOT / "tests").rglob("test_*.py"))
    assert min(len(gpu), len(rest)) > 100


def test_without_halves_everything_runs() -> None:
    assert "tests/" not in recipe("test").partition(" -m pytest ")[2].partition(";")[0]
    done = run(["make", "-n", "test", f"PYTHON={sys.executable}", "HALF=third"])
    assert "HALF is gpu or rest" in done.stderr


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(("system", "processes"), [("Darwin", "-n 3"), ("Linux", "")])
def test_a_hosted_mac_runs_three_tests_at_once(tmp_path: Path, system: str, processes: str) -> None:
    stub(tmp_path, "make", 'echo "make half=$HALF $*"')
    stub(tmp_path, "uname", f"echo {system}")
    stub(tmp_path, "apt-get", "exit 1")
    done = run(["bash", ".ci/run"], path=tmp_path, HALF="gpu", SWIFT="0")
    assert done.returncode == 0, done.stderr
    assert f"make half=gpu test ARGS=--timeout 300 {processes}\n" in done.stdout


def test_warnings_fail_the_build_of_the_newest_compiler_only(tmp_path: Path) -> None:
    stub(tmp_path, "swift", "exit 1")
    strict = [row["os"] for row in rows("swift") if "-warnings-as-errors" in row.get("flags", "")]
    macs = sorted(row["os"] for row in rows("test") if row["os"].startswith("macos"))
    assert [system for system in strict if system.startswith("macos")] == macs[-1:]
    assert "-Xswiftc -warnings-as-errors" in recipe("test-swift", path=tmp_path)
    assert "warnings" not in recipe("test-swift", path=tmp_path, SWIFTFLAGS="").partition("swift test")[2]
