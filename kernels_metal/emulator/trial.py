"""Checks a compiler and its options by linking and running a program."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# Like the runtime: uses the C++ library's headers, and something in it to link.
PROGRAM = """#include <stdio.h>
#include <map>
#include <string>
int main() { std::map<std::string, int> found; found["ok"] = 1; return puts(found.begin()->first.c_str()) < 0; }
"""
REASON = re.compile(r"(?:\berror: |\bERROR: |FATAL: )(.*)|(undefined reference to .*|cannot find .*)")


def cache_directory() -> Path:
    """`MLXINFER_EMULATOR_CACHE`, or `mlxinfer/emulator` in the user's cache directory; created if missing."""
    chosen = os.environ.get("MLXINFER_EMULATOR_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(chosen) if chosen else Path(base) / "mlxinfer" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def problem(compiler: str, options: Sequence[str]) -> str | None:
    """The fault in a few words, or None. Only success is cached, because the user may fix a failure."""
    key = hashlib.sha256(repr((compiler, Path(compiler).stat().st_mtime_ns, PROGRAM, *options)).encode()).hexdigest()[:24]
    passed = cache_directory() / f"trial-{key}"
    if passed.exists():
        return None
    with tempfile.TemporaryDirectory(prefix="mlxinfer-trial-") as folder:
        found = _tried(compiler, options, Path(folder) / "program")
    if found is None:
        passed.touch()
    return found


def _tried(compiler: str, options: Sequence[str], program: Path) -> str | None:
    """Build the program like the runtime: not instrumented, but linked with the sanitizer's library."""
    what = " ".join(option for option in options if option.startswith("-fsanitize=")) or "a program"
    compiled = _run([compiler, "-std=c++17", "-x", "c++", "-", "-c", "-o", f"{program}.o"], PROGRAM)
    if compiled.returncode:
        return f"cannot compile C++: {_first_reason(compiled.stderr)}"
    linked = _run([compiler, *options, "-rdynamic", f"{program}.o", "-ldl", "-lm", "-o", str(program)])
    if linked.returncode:
        return f"cannot link {what}: {_first_reason(linked.stderr)}"
    ran = _run([*fixed_addresses(), str(program)])
    if ran.returncode or ran.stdout != "ok\n":
        return f"links {what}, but the program fails: {_first_reason(ran.stderr) or f'exit status {ran.returncode}'}"
    return None


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as failure:
        return subprocess.CompletedProcess(command, 1, "", f"error: {failure}")


def _first_reason(report: str) -> str:
    match = REASON.search(report)
    text = (match[1] or match[2]) if match else report.strip().split("\n")[-1]
    return text.strip()[:120]


@cache
def fixed_addresses() -> tuple[str, ...]:
    """Command prefix that disables address randomization: ThreadSanitizer and MemorySanitizer need regions that random addresses may hit.

    Empty where the container does not allow it.
    """
    setarch = shutil.which("setarch")
    command = (setarch, "x86_64", "--addr-no-randomize") if setarch else ()
    if command and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        return command
    return ()
