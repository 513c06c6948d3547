"""Runs one step of the report: a command with a time limit, whose output is kept."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
_OF_MAKE = re.compile(r"MAKE.*|MFLAGS|ARGS")
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not _OF_MAKE.fullmatch(name)}
"""Variables as the user set them. On a Mac, importing mlxinfer sets some of MLX's, which mlx-lm must not inherit. The `make` that started
the report passes its own arguments on."""
_FIRST, _LAST = 1 << 16, 3 << 16
"""Bytes of a long output that are kept, from its beginning and from its end."""
_GRACE_S = 5.0
"""Seconds in which a command may end by itself once it is told to."""
_RESULT_CHARACTERS = 110


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the report."""

    title: str
    command: tuple[str, ...]
    seconds: float
    """Time limit."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the process."""
    needs: str = ""
    """Title of the step without whose success this one is left out."""
    file: Path | None = None
    """File that the command writes, which belongs to the output."""

    def shown(self) -> str:
        """Return the command as typed, relative to the checkout."""
        words = [*(f"{name}={value}" for name, value in self.environment.items()), *self.command]
        return " ".join(f"'{word}'" if " " in word else word for word in words).replace(f"{ROOT}/", "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step."""

    step: Step
    status: str
    """"ok", or the reason why not."""
    seconds: float = 0.0
    output: str = ""

    @property
    def result(self) -> str:
        """Return the last line of the output, shortened."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        return last if len(last) <= _RESULT_CHARACTERS else f"{last[:_RESULT_CHARACTERS]}..."


class Interrupted(Exception):
    """Ctrl-C came while a step ran. `outcome` has its output until then."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.step.title)
        self.outcome = outcome


def run(step: Step) -> Outcome:
    """Run a step to its end or its time limit. Its processes end with it. Raises `Interrupted` after a Ctrl-C."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output, _Interrupt() as interrupt:
        try:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env={**_ENVIRONMENT, **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(step, f"cannot start: {error.strerror}")
        interrupt.watch(process)
        try:
            code = process.wait(step.seconds)
            status = "ok" if code == 0 else _ending(code)
        except subprocess.TimeoutExpired:
            status = f"stopped after {step.seconds:.0f} s"
        _end(process)
        status = "interrupted" if interrupt.count else status
        outcome = Outcome(step, status, time.monotonic() - began, _text(output) + _text_of(step.file))
    if interrupt.count:
        raise Interrupted(outcome)
    return outcome


class _Interrupt:
    """Context in which Ctrl-C ends the process that is watched, a second one at once. None is lost while the process starts."""

    def __init__(self) -> None:
        self.count = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Interrupt:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self.count:
            _signal(process, signal.SIGTERM)

    def _handle(self, *_: object) -> None:
        self.count += 1
        if self._process is not None:
            _signal(self._process, signal.SIGTERM if self.count == 1 else signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Send a signal to the command and all that it started. Return False if nothing of it is left."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # a Mac forbids signals to processes that have ended
        return False
    return True


def _ending(code: int) -> str:
    return f"failed, exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command with all that it started."""
    if not _signal(process, signal.SIGTERM):
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    _signal(process, signal.SIGKILL)
    process.wait()


def _text(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size <= _FIRST + _LAST:
        return file.read().decode(errors="replace")
    first = file.read(_FIRST).decode(errors="replace")
    file.seek(size - _LAST)
    return f"{first}\n... {size - _FIRST - _LAST} bytes left out ...\n{file.read().decode(errors='replace')}"


def _text_of(file: Path | None) -> str:
    """Return the text of a step's file, and remove it."""
    if file is None or not file.exists():
        return ""
    text = file.read_text(encoding="utf-8", errors="replace")
    file.unlink()
    return f"\n{text}"


def output_of(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a command, and return its standard output. Raises ValueError with the last line of its output if it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ValueError(f"exit code {done.returncode}: {last}")
    return done.stdout
