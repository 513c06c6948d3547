"""Runs a command of the Makefile, and says what it does and how many seconds it took: `python step.py TEXT COMMAND...`.

`--together TEXT COMMAND... --and TEXT COMMAND...` runs commands beside one another. Each has a line once it has ended.

On a terminal the seconds count while the command runs, and its lines come above. A build names its own steps in the file
`$MLXINFER_BUILD_STEPS`, one a line, as pip shows nothing of a build. Each step gets a line with its seconds; an empty one goes back to
TEXT. With `--show` the command has the terminal to itself, and the seconds follow, as of an answer.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_LOOKS_S = 0.2
"""Seconds between two looks at what goes on."""


class Step:
    """The line of what goes on."""

    def __init__(self, text: str) -> None:
        self._live = sys.stdout.isatty()
        self._lock = threading.Lock()
        self._began = 0.0
        self._text = ""
        self.begin(text)

    def begin(self, text: str) -> None:
        """End the line of what went on until now, and begin the next one."""
        with self._lock:
            if self._text:
                self._end()
            self._text, self._began = text, time.monotonic()
            self._write(f"{text} ...")

    def count(self) -> None:
        if self._live:
            with self._lock:
                self._write(f"\r\x1b[K{self._text} ... {self._seconds:.0f} s")

    def show(self, line: str) -> None:
        """A line of the command, above."""
        with self._lock:
            self._write(f"\r\x1b[K{line}{self._text} ..." if self._live else f"\n{line}{self._text} ...")

    def end(self, *, failed: bool) -> None:
        with self._lock:
            self._end(" failed after" if failed else "")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _end(self, how: str = "") -> None:
        erased = "\r\x1b[K" + f"{self._text} ..." if self._live else ""
        self._write(f"{erased}{how} {self._seconds:.1f} s\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Board:
    """What goes on beside one another. On a terminal the last line has all of it."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._lock = threading.Lock()
        self._rows: list[Row] = []

    def add(self, text: str) -> Row:
        row = Row(self)
        self._rows.append(row)
        row.begin(text)
        return row

    def above(self, line: str) -> None:
        """Print a line, above what goes on."""
        with self._lock:
            Step._write(f"\r\x1b[K{line}\n" if self._live else f"{line}\n")
        self.draw()

    def draw(self) -> None:
        if self._live:
            with self._lock:
                shown = ", ".join(f"{row.text} ... {row.seconds:.0f} s" for row in self._rows if row.text)
                Step._write(f"\r\x1b[K{shown[: shutil.get_terminal_size().columns - 1]}")


class Row:
    """One of the commands of a board, with the methods of `Step`."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._began = 0.0
        self.text = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def begin(self, text: str) -> None:
        if self.text:
            self._end()
        self.text, self._began = text, time.monotonic()
        self._board.draw()

    def count(self) -> None:
        self._board.draw()

    def show(self, line: str) -> None:
        self._board.above(line.rstrip("\n"))

    def end(self, *, failed: bool) -> None:
        self._end(" failed after" if failed else "")

    def _end(self, how: str = "") -> None:
        line = f"{self.text} ...{how} {self.seconds:.1f} s"
        self.text = ""
        self._board.above(line)


def run(text: str, command: list[str], step: Step | Row) -> int:
    """Returns the exit code of the command."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder, "steps")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "MLXINFER_BUILD_STEPS": str(steps)},
        )
        reader = threading.Thread(target=_show_lines, args=(process, step))
        reader.start()
        seen = 0
        ended = False
        while not ended:
            reader.join(_LOOKS_S)
            ended = not reader.is_alive()  # what was named before its end is read once more below
            named = steps.read_text(encoding="utf-8").split("\n")[:-1] if steps.exists() else []
            for name in named[seen:]:
                step.begin(name or text)
            seen = len(named)
            step.count()
        code = process.wait()
    step.end(failed=code != 0)
    return code


def together(jobs: list[list[str]]) -> int:
    """Returns the exit code of the first command that failed."""
    board = Board()
    codes = [0] * len(jobs)

    def work(i: int, text: str, command: list[str]) -> None:
        codes[i] = run(text, command, board.add(text))

    threads = [threading.Thread(target=work, args=(i, text, command)) for i, (text, *command) in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return next((code for code in codes if code), 0)


def _jobs(arguments: list[str]) -> list[list[str]]:
    """What stands between the `--and`s."""
    jobs: list[list[str]] = [[]]
    for word in arguments:
        if word == "--and":
            jobs.append([])
        else:
            jobs[-1].append(word)
    return jobs


def _show_lines(process: subprocess.Popen[str], step: Step | Row) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        step.show(line if line.endswith("\n") else f"{line}\n")


def show(text: str, command: list[str]) -> int:
    """Returns the exit code of the command, which has the terminal to itself."""
    print(text, flush=True)  # noqa: T201
    began = time.monotonic()
    code = subprocess.call(command)
    if not code:
        print(f"answered in {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201
    return code


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    how, *rest = arguments
    try:
        if how == "--together":
            return together(_jobs(rest))
        if how == "--show":
            return show(rest[0], rest[1:])
        return run(how, rest, Step(how))
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
