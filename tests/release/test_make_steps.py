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
    assert names["run"]("installing", [sys.executable, "-c", BUILD, "0"], names["Step"]("installing")) == 0
    assert re.findall(r"^(\w+) \.\.\. \d", capsys.readouterr().out, re.MULTILINE) == ["installing", "compiling", "installing"]


def test_a_failure_is_said_with_its_output_and_exit_code():
    code, lines = _lines("installing", sys.executable, "-c", BUILD, "3")
    assert code == 3
    assert "a warning" in lines
    assert lines[-1] == "installing ... failed after N s"


def test_commands_beside_one_another_have_a_line_each():
    """The first one ends once the second one has begun."""
    first, second = "import sys; sys.stdin.read()", "print('a warning')"
    jobs = ["fetching", sys.executable, "-c", first, "--and", "installing", sys.executable, "-c", f"{second}\n{BUILD}", "0"]
    code, lines = _lines("--together", *jobs)
    assert code == 0
    assert sorted(lines) == sorted(
        ["fetching ... N s", "a warning", "a warning", "installing ... N s", "compiling ... N s", "installing ... N s"]
    )


def test_the_failure_of_one_is_that_of_all():
    code, lines = _lines("--together", "a", sys.executable, "-c", BUILD, "3", "--and", "b", sys.executable, "-c", "pass")
    assert code == 3
    assert "a ... failed after N s" in lines
    assert "b ... N s" in lines


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
    texts = ("creating the environment", "upgrading pip", "installing what it needs", "installing mlxinfer", "fetching", "answering:")
    for text in texts:
        assert any(text in line for line in said), text


def test_requirements_are_those_of_the_checkout_and_of_extras():
    names = runpy.run_path(str(ROOT / "packaging" / "requirements.py"))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = names["tomllib"].loads(text)["project"]
    assert names["requirements"](project, []) == project["dependencies"]
    extras = project["optional-dependencies"]
    found = names["requirements"](project, ["dev", "test"])
    assert {*project["dependencies"], *extras["test"], *extras["clients"], *extras["lint"], "torch>=2.6"} <= set(found)
    assert len(found) == len(set(found))
    assert not [line for line in found if line.startswith("mlxinfer")]


def test_test_files_that_ci_names_exist():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".ci" / "run", ROOT / "Makefile", *(ROOT / ".github").rglob("*.yml"))]
    named = re.findall(r"tests/[\w/.-]+\.py", "\n".join(texts))
    assert "tests/engine/test_llm.py" in named
    assert [name for name in named if not (ROOT / name).is_file()] == []
