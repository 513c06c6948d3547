"""The progress of long commands: lines without a terminal, one bar on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from mlxinfer.cli.common.stages import FIRST_S, Stages, human_time, stages
from mlxinfer.util.words import counted


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_short_command_writes_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    shown = Stages(now=clock)
    for done in range(10):
        clock.time += FIRST_S / 11
        shown.tell("reading", done, 10)
    assert capsys.readouterr().err == ""


def test_lines_say_how_much_is_left_at_the_speed_of_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    shown = Stages(now=clock)
    shown.of("writing a model")(5_000_000, 10_000_000)
    clock.time += 1000  # another stage, and another speed
    for done in range(1, 11):
        shown.tell("reading", 100 * done, 1000, "windows")
        clock.time += 10
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "reading: 100 of 1,000 windows",
        "reading: 400 of 1,000 windows, about 60 seconds left",
        "reading: 700 of 1,000 windows, about 30 seconds left",
    ]


def test_a_terminal_gets_one_bar_that_changes_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with stages() as shown:
        assert screen.getvalue() == ""  # messages come first
        for stage in ("weighing", "writing", "measuring"):
            shown.of(stage)(0, 100)
            shown.of(stage)(50, 100)
        (task,) = shown._bar.tasks
        assert (task.description, task.completed, task.fields["count"]) == ("measuring", 50, "50 B of 100 B")
    assert "measuring" in screen.getvalue()


def test_times_and_numbers_in_words() -> None:
    assert [human_time(seconds) for seconds in (0.2, 45, 120, 7200)] == [
        "about 1 second",
        "about 45 seconds",
        "about 2 minutes",
        "about 2.0 hours",
    ]
    assert [counted(number, "window") for number in (1, 2000)] == ["1 window", "2,000 windows"]
