"""Ctrl-C while a command starts: real processes that get SIGINT at a chosen import."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlxinfer.cli.common.interrupts import interrupts_end, was_interrupted

_HOOK = """
import os, sys
at, way = int(sys.argv.pop(1)), sys.argv.pop(1)
count, counting = 0, False
def hook(event, arguments):
    global count, counting
    if event == "import":
        counting = counting or arguments[0] == "mlxinfer.cli"  # from the first line of the command on
        count += counting
        if counting and count == at:
            os.kill(os.getpid(), 2)
sys.addaudithook(hook)
sys.argv[0] = "mlxinfer"
if way == "module":
    import runpy
    runpy.run_module("mlxinfer", run_name="__main__")
else:
    from mlxinfer.__main__ import main
    main()
"""
_NEVER = 0


def _started(at: int, way: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _HOOK, str(at), way, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize("way", ["module", "script"])
@pytest.mark.parametrize("at", [1, 2, 9, 25, 50, 70])
def test_a_process_that_still_imports_ends_without_a_word(at, way):
    done = _started(at, way, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("at", [85, 88, 91, 150, 250, 400])
def test_a_model_that_is_being_loaded_is_left_without_a_traceback(at, chat_model):
    done = _started(at, "script", "run", chat_model, "hello", "--max-tokens", "2")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_without_a_signal_the_same_processes_answer():
    done = _started(_NEVER, "module", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"mlxinfer, version", done.stdout)


def test_the_installed_command_is_the_one_that_is_tried_here():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'mlxinfer = "mlxinfer.__main__:main"' in text


def test_an_import_error_that_an_interrupt_caused_is_an_interrupt():
    wrapped = ImportError("Encountered an error while initializing the extension.")
    wrapped.__cause__ = KeyboardInterrupt()
    assert was_interrupted(wrapped)
    assert not was_interrupted(ImportError("no such module"))


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_end():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
