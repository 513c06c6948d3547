"""The report of a Mac: it runs to the end whatever fails, keeps what there is when interrupted, and names nobody."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.kernels.emulated import needs_emulator
from support.models.tiny_directory import tiny_directory

from benchmarks.__main__ import main as benchmarks
from benchmarks.mac_report import answers, running
from benchmarks.mac_report.__main__ import report
from benchmarks.mac_report.document import TITLE, document
from benchmarks.mac_report.running import ROOT, Outcome, Step, run
from benchmarks.mac_report.steps import INSTALL, Plan, steps
from benchmarks.mac_report.turns import Subject, in_turns, table
from mlxinfer.kernels_metal.emulator.trial import cache_directory
from mlxinfer.kernels_metal.source import all_kernels


def shell(title: str, script: str, seconds: float = 60, needs: str = "") -> Step:
    return Step(title, ("sh", "-c", script), seconds, needs=needs)


def test_a_step_has_its_output_and_how_it_ended() -> None:
    assert run(shell("a", "echo one; echo two >&2")).output == "one\ntwo\n"
    assert run(shell("a", "exit 3")).status == "failed, exit code 3"
    assert run(shell("a", "kill -KILL $$")).status == "ended by SIGKILL"
    assert run(Step("a", ("no-such-command",), 1)).status == "cannot start: No such file or directory"


def test_a_step_that_takes_too_long_is_stopped() -> None:
    assert run(shell("a", "sleep 600", seconds=0.05)).status == "stopped after 0 s"


def test_all_that_a_step_started_ends_with_it() -> None:
    script = ["sh", "-c", "sleep 600 & echo $!; wait"]
    process = subprocess.Popen(script, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline()  # the child is there
    running._end(process)
    assert process.stdout.read() == b""  # no process has it open any more
    process.stdout.close()
    assert process.returncode == -signal.SIGTERM


def test_of_a_long_output_both_ends_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_FIRST", 20)
    monkeypatch.setattr(running, "_LAST", 20)
    found = run(Step("a", (sys.executable, "-c", "print('first' + 1000 * '.' + 'last')"), 60)).output
    assert re.fullmatch(r"first\.+\n\.\.\. 970 bytes left out \.\.\.\n\.+last\n", found)


def test_variables_that_mlxinfer_sets_for_mlx_do_not_reach_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Mac, importing mlxinfer sets them; mlx-lm has to be measured without them."""
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "171")
    assert run(shell("a", "echo x$MLX_MAX_MB_PER_BUFFER")).output == "x\n"


def test_a_failing_step_stops_only_those_that_need_it(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    todo = [shell("bad", "echo reason; exit 1"), shell("next", "exit 0", needs="bad"), shell("last", "exit 0", needs="next")]
    outcomes = report([*todo, shell("good", "echo fine")], file)
    assert [o.status for o in outcomes] == ["failed, exit code 1", "left out: bad failed", "left out: next failed", "ok"]
    text = file.read_text()
    assert text.startswith(TITLE)
    assert "| bad | failed, exit code 1 | " in text
    assert " | reason |\n" in text
    assert "| next | left out: bad failed | 0.0 |  |" in text


INTERRUPTED = """
import sys
from pathlib import Path
from benchmarks.mac_report.__main__ import report
from benchmarks.mac_report.running import Step
steps = [("one", "echo done"), ("two", "echo half; kill -INT $PPID; sleep 600"), ("three", "echo never")]
report([Step(title, ("sh", "-c", script), 60) for title, script in steps], Path(sys.argv[1]))
"""


def test_an_interruption_keeps_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(file)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[2/3] two ... interrupted\n")
    text = file.read_text()
    assert "| one | ok | " in text
    assert "| two | interrupted | " in text
    assert "\nhalf\n" in text
    assert "three" not in text


def test_output_cannot_break_the_document() -> None:
    output = "\x1b[32mgreen\x1b[0m\n 10 %\r 50 %\r100 %\n```\n| cell |\n"
    text = document([Outcome(shell("a", "true"), "ok", 1.0, output)])
    assert "| a | ok | 1.0 | / cell / |" in text
    assert "\n````\ngreen\n100 %\n```\n| cell |\n````\n" in text


def test_steps_need_earlier_ones_and_run_what_there_is() -> None:
    for quick in (False, True):
        todo = steps(Plan(quick=quick))
        titles = [step.title for step in todo]
        assert len(set(titles)) == len(titles)
        for number, step in enumerate(todo):
            assert not step.needs or step.needs in titles[:number], step.title
            if "benchmarks" in step.command:
                assert step.command[step.command.index("benchmarks") + 1] in benchmarks.commands
            assert step.needs or number <= titles.index(INSTALL) or step.command[0] in ("pmset", "uptime"), step.title
    variables = {name: value for step in steps(Plan()) for name, value in step.environment.items()}
    assert variables == {"MTL_DEBUG_LAYER": "1", "MTL_SHADER_VALIDATION": "1"}


@pytest.mark.long
def test_the_tests_of_every_kernel_are_run() -> None:
    (step,) = (step for step in steps(Plan()) if step.title == "kernels against float64")
    command = ["make", "-n", *step.command[1:]]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # within make, lines about folders follow
    recipe = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True).stdout
    options = recipe.strip().splitlines()[-1].split(" -m pytest ")[1].split(" -m ")[1].split()
    assert options[:2] == ["emulator", "tests"]
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", *options[:2]]
    found = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for folder in sorted({file.partition("/")[0] for file in all_kernels().values()}):
        assert re.search(rf"tests/\S*{folder}", found), folder


def test_make_starts_it() -> None:
    command = ["make", "-n", "mac-report", f"PYTHON={sys.executable}", "ARGS=--quick"]
    recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"{sys.executable} -m benchmarks.mac_report --environment .venv --quick" in recipe
    assert running._OF_MAKE.fullmatch("MAKEFLAGS")
    assert running._OF_MAKE.fullmatch("ARGS")


def test_medians_and_ratios_of_rounds() -> None:
    ours, theirs = Subject("ours", [], float, speeds=[10.0, 30.0, 20.0]), Subject("theirs", [], float, speeds=[10.0, 10.0, 10.0])
    rows = table([("1 stream", [ours, theirs])]).splitlines()[2:]
    assert rows == ["| 1 stream | ours | 20.0 | 2.00 | 10.0, 30.0, 20.0 |", "| 1 stream | theirs | 10.0 | 1.00 | 10.0, 10.0, 10.0 |"]


def test_programs_are_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order changes from round to round, and a run that fails does not end the others."""
    log = tmp_path / "log"

    def subject(name: str, script: str) -> Subject:
        return Subject(name, ["sh", "-c", f"echo {name} >> {log}; {script}"], float)

    assert in_turns([("x", [subject("a", "echo 4"), subject("b", "echo 2")]), ("y", [subject("c", "echo why; exit 1")])], rounds=2) == 2
    assert log.read_text().split() == ["a", "b", "c", "b", "a", "c"]
    out = capsys.readouterr().out
    assert "round 2: c: exit code 1: why" in out
    assert out.count("| x | a | 4.0 | 2.00 |") == 2


def test_what_answers_have_in_common() -> None:
    assert answers.common("the sea", "the ship") == 5
    assert answers.common("", "x") == 0
    assert answers.common("same", "same") == 4


STUBS = {
    "make": 'echo "make $1"',
    "sw_vers": 'echo "ProductVersion: 15.1 of $USER in $HOME/here"',
    "sysctl": "echo Apple M4 Max",
    "pmset": 'echo "-InternalBattery-0 (id=1234567) 80%; on Quentins-MacBook"',
    "xcode-select": "exit 2",
}
"""Commands of macOS, and `make`, whose targets install the package and run its tests."""


@needs_emulator
@pytest.mark.long
def test_the_whole_report(tmp_path: Path) -> None:
    """All steps with a tiny model, as far as Linux has them: what needs a GPU fails, and the rest runs."""
    home, tools, model = tmp_path / "Users" / "quentin", tmp_path / "bin", tiny_directory(tmp_path / "tiny", eos=False, rounded=True)
    for folder in (home, tools):
        folder.mkdir(parents=True)
    for name, script in STUBS.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    cache = os.environ.get("MLXINFER_EMULATOR_CACHE", str(cache_directory()))
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "USER": "quentin",
        "LOGNAME": "quentin",
        "MLXINFER_KERNELS": "emulator",
        "MLXINFER_EMULATOR_CACHE": cache,
        "HF_HUB_OFFLINE": "1",
    }
    file = tmp_path / "report.md"
    command = [sys.executable, "-m", "benchmarks.mac_report", "--quick", "--output", str(file), "--environment", sys.prefix]
    done = subprocess.run(
        [*command, "--small", str(model), "--model", str(model)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = file.read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| [\d.]+ \| .*\|$", text.partition("\n## ")[0], re.MULTILINE))
    assert list(rows) == [step.title for step in steps(Plan())]
    failed = {title: status for title, status in rows.items() if status != "ok"}
    assert failed == {"developer tools": "failed, exit code 2"} | dict.fromkeys(("attention", "products"), "failed, exit code 1")
    assert "needs an Apple GPU" in text
    assert "variants compiled" in text
    assert "mlxinfer / mlx-lm: 1 stream " in text
    assert "tiny: llama" in text
    assert "ProductVersion: 15.1 of USER in ~/here" in text
    for word in ("quentin in", "/quentin", "1234567", str(ROOT)):
        assert word not in text, word
