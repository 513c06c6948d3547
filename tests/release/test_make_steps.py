"""Output of `make demo` during its steps, and the test files that CI names."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = [sys.executable, str(ROOT / "packaging" / "step.py")]
BUILD = """
import os, sys
with open(os.environ["MLXINFER_BUILD_STEPS"], "a") as file:
    file.write("compiling\\n\\n")
print("a warning")
sys.exit(int(sys.argv[1]))
"""


def _lines(*arguments: str) -> tuple[int, list[str]]:
    """The exit code, and what was said with all seconds as N."""
    done = subprocess.run([*STEP, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.returncode, re.sub(r"\d+\.\d s", "N s", done.stdout).splitlines()


def test_each_step_of_a_build_has_its_seconds():
    code, lines = _lines("installing", sys.executable, "-c", BUILD, "0")
    assert code == 0
    timed = [line for line in lines if line.endswith("N s")]
    assert timed == ["installing ... N s", "compiling ... N s", "installing ... N s"]
    assert "a warning" in lines


def test_steps_are_shown_of_a_command_that_ended_before_the_first_look(monkeypatch, capsys):
    """As on a busy machine."""
    names = runpy.run_path(STEP[1])
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (start(self), self.join()))
    assert names["run"]("installing", [sys.executable, "-c", BUILD, "0"]) == 0
    assert re.findall(r"^(\w+) \.\.\. \d", capsys.readouterr().out, re.MULTILINE) == ["installing", "compiling", "installing"]


def test_a_failure_is_said_with_its_output_and_exit_code():
    code, lines = _lines("installing", sys.executable, "-c", BUILD, "3")
    assert code == 3
    assert "a warning" in lines
    assert lines[-1] == "installing ... failed after N s"


def test_an_answer_has_the_terminal_to_itself():
    assert _lines("--show", "answering", sys.executable, "-c", "print('Paris')") == (0, ["answering", "Paris", "answered in N s"])


def test_on_a_terminal_the_line_is_replaced():
    ours, theirs = os.openpty()
    process = subprocess.Popen([*STEP, "installing", sys.executable, "-c", "pass"], stdout=theirs, close_fds=True)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # Linux: the other end was closed
        pass
    assert process.wait(timeout=60) == 0
    assert re.fullmatch(rb"installing \.\.\.(\r\x1b\[Kinstalling \.\.\. \d+ s)*\r\x1b\[Kinstalling \.\.\. \d+\.\d s\r\n", shown), shown


def test_the_build_names_its_step(tmp_path, monkeypatch):
    """Of setup.py itself, whose `setup` is left out."""
    source = (ROOT / "setup.py").read_text(encoding="utf-8").rpartition("\nsetup(")[0]
    names: dict[str, object] = {"__file__": str(ROOT / "setup.py"), "__name__": "setup"}
    exec(compile(source, "setup.py", "exec"), names)
    announce = names["announce"]
    assert callable(announce)
    monkeypatch.setenv("MLXINFER_BUILD_STEPS", str(tmp_path / "steps"))
    announce("compiling")
    announce("")
    assert (tmp_path / "steps").read_text() == "compiling\n\n"


def test_every_step_of_make_demo_is_timed():
    shown = subprocess.run(
        ["make", "-n", "-W", "pyproject.toml", "demo", "VENV=/nonexistent"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said = [line for line in shown.stdout.splitlines() if "packaging/step.py" in line]
    for text in ("creating the environment", "upgrading pip", "installing mlxinfer", "fetching SmolLM2", "answering: mlxinfer run"):
        assert any(text in line for line in said), text


def test_test_files_that_ci_names_exist():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".ci" / "run", ROOT / "Makefile", *(ROOT / ".github").rglob("*.yml"))]
    named = re.findall(r"tests/[\w/.-]+\.py", "\n".join(texts))
    assert "tests/engine/test_llm.py" in named
    assert [name for name in named if not (ROOT / name).is_file()] == []
